#include "tools/gpu_check/check_device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/api/bfloat16.h"
#include "kernels/device_factory.h"
#include "tools/gpu_check/on_device.h"

namespace upipe::gpu_check {
namespace {

using kernels::Buffer;
using kernels::DType;
using kernels::MemoryTag;
using kernels::OpParams;
using kernels::TensorView;

constexpr char kLibraryAttention[] = "cudnn 9.19";

// Elements that normal numbers are made of, and differences taken of, at a time.
constexpr int64_t kChunk = int64_t{1} << 26;
// Of the rows that tensors without heads are taken for, where they can.
constexpr int64_t kWidth = 128;

// A batch lasts so long, if one run does not already.
constexpr absl::Duration kBatch = absl::Milliseconds(15);
constexpr int kBatchesMost = 5;
constexpr int kRunsMost = 500;
// All batches of one call.
constexpr absl::Duration kLongEnough = absl::Milliseconds(1500);

TensorView Flat(const TensorView& view) {
  UPIPE_CHECK(view.contiguous()) << "a tensor with gaps";
  return TensorView::Vector(view.data, view.dtype, view.num_elements());
}

TensorView Piece(const TensorView& vector, int64_t begin) {
  return vector.Rows(begin, std::min(kChunk, vector.shape[0] - begin));
}

double ElementAt(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  UPIPE_CHECK(dtype == DType::kBFloat16) << "a dtype that is not read";
  return static_cast<const kernels::BFloat16*>(data)[index].ToFloat();
}

}  // namespace

double Median(std::vector<double> values) {
  UPIPE_CHECK(!values.empty()) << "the median of nothing";
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

absl::StatusOr<std::unique_ptr<CheckDevice>> CheckDevice::Create(const Settings& settings,
                                                                 int64_t arena_bytes) {
  std::unique_ptr<CheckDevice> check(new CheckDevice());
  check->settings_ = settings;
  kernels::DeviceOptions options = {
      .backend = settings.backend, .arena_bytes = arena_bytes, .host_bytes = 1 << 20};
  UPIPE_ASSIGN_OR_RETURN(check->device_, kernels::CreateDevice(options));
  const bool cuda = settings.backend == "cuda";
  check->own_ = {cuda ? "own" : settings.backend, &check->device_->ops()};
  // Its ops alone are used, on the first one's streams and memory.
  options.arena_bytes = 1 << 20;
  if (cuda) {
    options.attention_kernel = kLibraryAttention;
  } else {
    options.backend = "reference";
  }
  auto library = kernels::CreateDevice(options);
  if (library.ok()) {
    check->library_device_ = *std::move(library);
    check->library_ = {cuda ? "cuDNN" : "reference", &check->library_device_->ops()};
  } else {
    check->no_library_ = std::string(library.status().message());
  }
  check->stream_ = check->device_->CreateStream("check");
  return check;
}

std::vector<NamedOps> CheckDevice::all_ops() const {
  std::vector<NamedOps> all = {own_};
  if (library_) all.push_back(*library_);
  return all;
}

absl::StatusOr<TensorView> CheckDevice::Tensor(DType dtype, std::initializer_list<int64_t> dims) {
  TensorView view = {.data = nullptr, .dtype = dtype, .rank = static_cast<int>(dims.size())};
  view.shape = {1, 1, 1};
  std::copy(dims.begin(), dims.end(), view.shape.begin());
  int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    view.stride[dim] = stride;
    stride *= view.shape[dim];
  }
  UPIPE_ASSIGN_OR_RETURN(Buffer buffer, device_->allocator().Allocate(MemoryTag::kWorkspace,
                                                                      view.num_bytes(), *stream_));
  view.data = buffer.data();
  buffers_.push_back(std::move(buffer));
  return view;
}

absl::Status CheckDevice::Clear() {
  const absl::Status status = stream_->Synchronize();
  buffers_.clear();
  return status;
}

absl::Status CheckDevice::Run(const NamedOps& ops, const OpParams& params) {
  const int64_t bytes = ops.ops->WorkspaceBytes(params);
  UPIPE_ASSIGN_OR_RETURN(const Buffer scratch,
                         device_->allocator().Allocate(MemoryTag::kWorkspace, bytes, *stream_));
  return ops.ops->Enqueue(params, {scratch.data(), bytes}, *stream_);
}

absl::Status CheckDevice::RunToEnd(const NamedOps& ops, const OpParams& params) {
  UPIPE_RETURN_IF_ERROR(Run(ops, params));
  return stream_->Synchronize();
}

absl::Status CheckDevice::Fill(const TensorView& view, double value) {
  return Run(own_, kernels::FillParams{view, value});
}

absl::Status CheckDevice::FillNormal(const TensorView& view, uint64_t seed, double stddev) {
  const TensorView all = Flat(view);
  if (all.shape[0] == 0) return absl::OkStatus();
  UPIPE_ASSIGN_OR_RETURN(const Buffer wide,
                         device_->allocator().Allocate(
                             MemoryTag::kWorkspace,
                             std::min(kChunk, all.shape[0]) * SizeOf(DType::kFloat32), *stream_));
  for (int64_t begin = 0; begin < all.shape[0]; begin += kChunk) {
    const TensorView piece = Piece(all, begin);
    const bool direct = view.dtype == DType::kFloat32;
    const TensorView numbers =
        direct ? piece : TensorView::Vector(wide.data(), DType::kFloat32, piece.shape[0]);
    UPIPE_RETURN_IF_ERROR(
        Run(own_, kernels::RandomNormalParams{.dst = numbers,
                                              .seed = seed,
                                              .first_index = begin,
                                              .stddev = static_cast<float>(stddev)}));
    if (!direct)
      UPIPE_RETURN_IF_ERROR(
          Run(own_, kernels::StridedCopyParams{numbers.AsTensor3(), piece.AsTensor3()}));
  }
  return absl::OkStatus();
}

absl::Status CheckDevice::Upload(const TensorView& view, const void* host) {
  device_->CopyFromHost(view.data, host, view.num_bytes(), *stream_);
  return stream_->Synchronize();
}

absl::StatusOr<std::vector<char>> CheckDevice::Bytes(const TensorView& view) {
  std::vector<char> bytes(Flat(view).num_bytes());
  device_->CopyToHost(bytes.data(), view.data, view.num_bytes(), *stream_);
  UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
  return bytes;
}

absl::StatusOr<std::vector<std::vector<double>>> CheckDevice::Rows(
    const TensorView& view, const std::vector<int64_t>& rows) {
  const int64_t width = view.rank == 3 ? view.shape[2] : 1;
  const int64_t row_bytes = width * SizeOf(view.dtype);
  std::vector<char> bytes(rows.size() * row_bytes);
  for (size_t i = 0; i < rows.size(); ++i) {
    device_->CopyToHost(bytes.data() + i * row_bytes,
                        view.rank == 3 ? view.At(rows[i]) : view.At(0, rows[i]), row_bytes,
                        *stream_);
  }
  UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
  std::vector<std::vector<double>> values(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    for (int64_t e = 0; e < width; ++e) {
      values[i].push_back(ElementAt(bytes.data() + i * row_bytes, view.dtype, e));
    }
  }
  return values;
}

absl::StatusOr<double> CheckDevice::SumOfSquares(const TensorView& vector) {
  double sum = 0;
  UPIPE_ASSIGN_OR_RETURN(const Buffer out, device_->allocator().Allocate(MemoryTag::kWorkspace,
                                                                         sizeof(sum), *stream_));
  const TensorView view = TensorView::Vector(out.data(), DType::kFloat64, 1);
  UPIPE_RETURN_IF_ERROR(Fill(view, 0));
  UPIPE_RETURN_IF_ERROR(Run(own_, kernels::SumOfSquaresParams{vector, view}));
  device_->CopyToHost(&sum, out.data(), sizeof(sum), *stream_);
  UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
  return sum;
}

absl::StatusOr<double> CheckDevice::Difference(const TensorView& a, const TensorView& b) {
  UPIPE_CHECK(a.contiguous() && b.contiguous() && a.dtype == b.dtype && a.shape == b.shape)
      << "tensors that are not alike";
  const int64_t elements = a.num_elements();
  const int64_t width = a.rank == 3 ? a.shape[2] : elements % kWidth == 0 ? kWidth : 1;
  const int64_t num_rows = elements / width, chunk = kChunk / width;
  const auto allocate = [&](int64_t bytes) {
    return device_->allocator().Allocate(MemoryTag::kWorkspace, bytes, *stream_);
  };
  UPIPE_ASSIGN_OR_RETURN(const Buffer ones, allocate(width * width * SizeOf(a.dtype)));
  UPIPE_ASSIGN_OR_RETURN(const Buffer wide,
                         allocate(std::min(chunk, num_rows) * width * SizeOf(DType::kFloat32)));
  const TensorView identity = TensorView::Matrix(ones.data(), a.dtype, width, width);
  UPIPE_RETURN_IF_ERROR(Fill(identity, 0));
  // The diagonal is a column whose elements lie a row and an element apart.
  UPIPE_RETURN_IF_ERROR(Fill(TensorView::Matrix(ones.data(), a.dtype, width, 1, width + 1), 1));
  double error = 0, norm = 0;
  for (int64_t begin = 0; begin < num_rows; begin += chunk) {
    const int64_t rows = std::min(chunk, num_rows - begin);
    const auto matrix = [&](const TensorView& view) {
      return TensorView::Matrix(view.data, view.dtype, num_rows, width).Rows(begin, rows);
    };
    const TensorView delta = TensorView::Matrix(wide.data(), DType::kFloat32, rows, width);
    UPIPE_RETURN_IF_ERROR(
        Run(own_, kernels::StridedCopyParams{matrix(b).AsTensor3(), delta.AsTensor3()}));
    UPIPE_ASSIGN_OR_RETURN(const double squares, SumOfSquares(Flat(delta)));
    norm += squares;
    UPIPE_RETURN_IF_ERROR(
        Run(own_, kernels::MatmulParams{
                      .a = matrix(a), .b = identity, .c = delta, .alpha = -1.0f, .beta = 1.0f}));
    UPIPE_ASSIGN_OR_RETURN(const double differences, SumOfSquares(Flat(delta)));
    error += differences;
  }
  if (!std::isfinite(error) || !std::isfinite(norm)) return std::numeric_limits<double>::infinity();
  return error == 0 ? 0 : std::sqrt(error / norm);
}

template <typename Submit>
absl::StatusOr<double> CheckDevice::Time(const Submit& submit) {
  const auto batch = [&](int64_t runs) -> absl::StatusOr<absl::Duration> {
    UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
    const int64_t begin = absl::GetCurrentTimeNanos();
    for (int64_t i = 0; i < runs; ++i) UPIPE_RETURN_IF_ERROR(submit());
    UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
    return absl::Nanoseconds(absl::GetCurrentTimeNanos() - begin);
  };
  UPIPE_ASSIGN_OR_RETURN(const absl::Duration first, batch(1));
  if (first > kLongEnough) return absl::ToDoubleSeconds(first);  // warming up is a trifle of it
  UPIPE_ASSIGN_OR_RETURN(const absl::Duration once, batch(1));
  const int64_t runs = std::clamp<int64_t>(
      static_cast<int64_t>(absl::FDivDuration(kBatch, std::max(once, absl::Nanoseconds(1)))), 1,
      settings_.small ? 1 : kRunsMost);
  std::vector<double> seconds;
  const absl::Time begin = absl::Now();
  while (static_cast<int>(seconds.size()) < (settings_.small ? 1 : kBatchesMost) &&
         absl::Now() - begin < kLongEnough) {
    UPIPE_ASSIGN_OR_RETURN(const absl::Duration taken, batch(runs));
    seconds.push_back(absl::ToDoubleSeconds(taken) / static_cast<double>(runs));
  }
  return Median(seconds);
}

absl::StatusOr<double> CheckDevice::Seconds(const NamedOps& ops, const OpParams& params) {
  const int64_t bytes = ops.ops->WorkspaceBytes(params);
  UPIPE_ASSIGN_OR_RETURN(const Buffer scratch,
                         device_->allocator().Allocate(MemoryTag::kWorkspace, bytes, *stream_));
  return Time([&] { return ops.ops->Enqueue(params, {scratch.data(), bytes}, *stream_); });
}

absl::StatusOr<double> CheckDevice::CopySeconds(void* dst, const void* src, int64_t bytes) {
  return Time([&] {
    CopyOnDevice(dst, src, bytes, *stream_);
    return absl::OkStatus();
  });
}

}  // namespace upipe::gpu_check
