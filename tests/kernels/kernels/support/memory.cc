#include "tests/kernels/kernels/support/memory.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/rounding.h"
#include "kernels/api/bfloat16.h"

namespace upipe::kernels::testing {
namespace {

// Sentinel elements before and after: an odd number aligns a tensor to its elements and no more.
constexpr int64_t kOddBorder = 17, kAlignedBorder = 16;
constexpr char kSentinel = 0x5a;

// Calls body(i, j, k) for every element.
template <typename Body>
void ForEach(const TensorView& view, const Body& body) {
  for (int64_t i = 0; i < view.shape[0]; ++i) {
    for (int64_t j = 0; j < view.shape[1]; ++j) {
      for (int64_t k = 0; k < view.shape[2]; ++k) body(i, j, k);
    }
  }
}

}  // namespace

void SetElement(const TensorView& view, int64_t i, int64_t j, int64_t k, double value) {
  void* element = view.At(i, j, k);
  switch (view.dtype) {
    case DType::kFloat32:
      *static_cast<float*>(element) = static_cast<float>(value);
      break;
    case DType::kBFloat16:
      *static_cast<BFloat16*>(element) = BFloat16::From(static_cast<float>(value));
      break;
    case DType::kFloat64:
      *static_cast<double*>(element) = value;
      break;
    case DType::kInt32:
      *static_cast<int32_t*>(element) = std::isnan(value) ? -77 : static_cast<int32_t>(value);
      break;
    case DType::kInt64:
      *static_cast<int64_t*>(element) = std::isnan(value) ? -77 : static_cast<int64_t>(value);
      break;
  }
}

double GetElement(const TensorView& view, int64_t i, int64_t j, int64_t k) {
  const void* element = view.At(i, j, k);
  switch (view.dtype) {
    case DType::kFloat32:
      return *static_cast<const float*>(element);
    case DType::kBFloat16:
      return static_cast<const BFloat16*>(element)->ToFloat();
    case DType::kFloat64:
      return *static_cast<const double*>(element);
    case DType::kInt32:
      return *static_cast<const int32_t*>(element);
    case DType::kInt64:
      return static_cast<double>(*static_cast<const int64_t*>(element));
  }
  return 0;
}

void CopyElements(const TensorView& src, const TensorView& dst) {
  ForEach(src, [&](int64_t i, int64_t j, int64_t k) {
    SetElement(dst, i, j, k, GetElement(src, i, j, k));
  });
}

TensorView Memory::Add(const Shape& shape, DType dtype, bool writable,
                       const std::function<double()>& value) {
  auto block = std::make_unique<Block>();
  TensorView& view = block->view;
  view = {nullptr, dtype, static_cast<int>(shape.dims.size()), {1, 1, 1}, {0, 0, 0}};
  const bool aligned = alignment_ == Alignment::kSixteenBytes;
  const int64_t gap = aligned ? RoundUp(shape.gap, kAlignedBorder) : shape.gap;
  int64_t elements = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    view.shape[dim] = shape.dims[dim];
    view.stride[dim] = elements;
    elements = elements * std::max<int64_t>(1, shape.dims[dim]) + gap;
  }
  const int64_t size = SizeOf(dtype);
  const int64_t border = aligned ? kAlignedBorder : kOddBorder;
  block->bytes.assign((elements + 2 * border) * size, kSentinel);
  block->writable.assign(block->bytes.size(), false);
  view.data = block->bytes.data() + border * size;
  ForEach(view, [&](int64_t i, int64_t j, int64_t k) {
    SetElement(view, i, j, k, value());
    const int64_t offset = static_cast<char*>(view.At(i, j, k)) - block->bytes.data();
    for (int64_t b = 0; b < size && writable; ++b) block->writable[offset + b] = true;
  });
  block->before = block->bytes;
  blocks_.push_back(std::move(block));
  return blocks_.back()->view;
}

TensorView Memory::Input(Shape shape, double scale, std::optional<DType> dtype) {
  std::normal_distribution<double> normal(0, scale);
  return Add(shape, dtype.value_or(storage_), false, [&] { return normal(random_); });
}

TensorView Memory::Output(std::string name, Shape shape, std::optional<DType> dtype) {
  AddResult(std::move(name),
            Add(shape, dtype.value_or(storage_), true, [] { return std::nan(""); }));
  return results_.back().second;
}

TensorView Memory::InOut(std::string name, Shape shape, double scale, std::optional<DType> dtype) {
  AddResult(std::move(name), Consumed(std::move(shape), scale, dtype));
  return results_.back().second;
}

TensorView Memory::Consumed(Shape shape, double scale, std::optional<DType> dtype) {
  std::normal_distribution<double> normal(0, scale);
  return Add(shape, dtype.value_or(storage_), true, [&] { return normal(random_); });
}

void Memory::AddResult(std::string name, const TensorView& view) {
  results_.emplace_back(std::move(name), view);
}

TensorView Memory::Ints(const std::vector<int32_t>& values) {
  size_t next = 0;
  return Add({{static_cast<int64_t>(values.size())}}, DType::kInt32, false,
             [&] { return values[next++]; });
}

TensorView Memory::Positions(const std::vector<int64_t>& values) {
  size_t next = 0;
  return Add({{static_cast<int64_t>(values.size())}}, DType::kInt64, false,
             [&] { return static_cast<double>(values[next++]); });
}

TensorView Memory::Doubles(const std::vector<double>& values) {
  size_t next = 0;
  return Add({{static_cast<int64_t>(values.size())}}, DType::kFloat64, false,
             [&] { return values[next++]; });
}

void Memory::Seal() {
  for (auto& block : blocks_) block->before = block->bytes;
}

void Memory::Restore() {
  for (auto& block : blocks_)
    std::memcpy(block->bytes.data(), block->before.data(), block->before.size());
}

std::vector<Memory::Result> Memory::Results() const {
  std::vector<Result> results;
  for (const auto& [name, view] : results_) {
    Result& result = results.emplace_back(Result{name, view.dtype, {}});
    ForEach(view, [&, &view = view](int64_t i, int64_t j, int64_t k) {
      result.values.push_back(GetElement(view, i, j, k));
    });
  }
  return results;
}

std::string Memory::Damage() const {
  for (size_t index = 0; index < blocks_.size(); ++index) {
    const Block& block = *blocks_[index];
    for (size_t i = 0; i < block.bytes.size(); ++i) {
      if (block.writable[i] || block.bytes[i] == block.before[i]) continue;
      return absl::StrCat("byte ", i, " of tensor ", index, ", counted from 0 as built, changed");
    }
  }
  return "";
}

}  // namespace upipe::kernels::testing
