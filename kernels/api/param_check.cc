#include "kernels/api/param_check.h"

#include <algorithm>
#include <string>

namespace upipe::kernels {
namespace {

std::string ShapeText(const TensorView& view) {
  std::string text = "[";
  for (int dim = 0; dim < view.rank; ++dim) {
    absl::StrAppend(&text, dim > 0 ? ", " : "", view.shape[dim]);
  }
  return text + "]";
}

std::string StrideText(const TensorView& view) {
  std::string text = "[";
  for (int dim = 0; dim < view.rank; ++dim) {
    absl::StrAppend(&text, dim > 0 ? ", " : "", view.stride[dim]);
  }
  return text + "]";
}

}  // namespace

void ParamCheck::Fail(absl::string_view sentence) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat(op_, ": ", sentence));
}

void ParamCheck::Input(const char* field, const TensorView& view, int rank, ElementType type) {
  if (!view.present()) return Fail(absl::StrCat(field, " is absent"));
  if (view.rank != rank) {
    return Fail(absl::StrCat(field, " has rank ", view.rank, ", must be ", rank));
  }
  Element(field, view.dtype, type);
  Layout(field, view);
}

void ParamCheck::Element(const char* field, DType dtype, ElementType type) {
  using Rule = ElementType::Rule;
  const bool is_wide = dtype == DType::kFloat32;
  std::string rule;
  if (type.rule == Rule::kExactly) {
    if (dtype != type.dtype) rule = NameOf(type.dtype);
  } else if (type.rule == Rule::kFloating || storage_field_ == nullptr) {
    if (!is_wide && dtype != DType::kBFloat16) rule = "fp32 or bf16";
  } else if (dtype != storage_ && !(type.rule == Rule::kStorageOrWide && is_wide)) {
    rule = absl::StrCat(NameOf(storage_), " as ", storage_field_);
    if (type.rule == Rule::kStorageOrWide && storage_ != DType::kFloat32) rule += ", or fp32";
  }
  if (!rule.empty()) Fail(absl::StrCat(field, " is ", NameOf(dtype), ", must be ", rule));
  if (type.rule == Rule::kStorage && storage_field_ == nullptr) {
    storage_field_ = field;
    storage_ = dtype;
  }
}

void ParamCheck::Output(const char* field, const TensorView& view, int rank, ElementType type) {
  Input(field, view, rank, type);
  if (status_.ok()) NoSelfOverlap(field, view);
}

void ParamCheck::AnyOutput(const char* field, const TensorView& view) {
  if (view.rank < 1 || view.rank > 3) {
    return Fail(absl::StrCat(field, " has rank ", view.rank, ", must be 1 to 3"));
  }
  Output(field, view, view.rank, view.dtype);
}

void ParamCheck::Layout(const char* field, const TensorView& view) {
  for (int dim = 0; dim < 3; ++dim) {
    if (dim < view.rank ? view.shape[dim] < 0 : view.shape[dim] != 1) {
      return Fail(absl::StrCat(field, ".shape[", dim, "] = ", view.shape[dim], ", must be ",
                               dim < view.rank ? ">= 0" : "1 beyond the rank"));
    }
    if (dim < view.rank && view.stride[dim] < 0) {
      return Fail(absl::StrCat(field, ".stride[", dim, "] = ", view.stride[dim], ", must be >= 0"));
    }
  }
  const int last = view.rank - 1;
  if (view.shape[last] > 1 && view.stride[last] != 1) {
    return Fail(absl::StrCat(field, " has last stride ", view.stride[last], ", must be 1"));
  }
  if (view.num_elements() == 0) return;
  if (view.data == nullptr) return Fail(absl::StrCat(field, " has no address"));
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(SizeOf(view.dtype)) != 0) {
    Fail(absl::StrCat(field, " is not aligned to ", SizeOf(view.dtype), " bytes"));
  }
}

void ParamCheck::NoSelfOverlap(const char* field, const TensorView& view) {
  if (view.num_elements() == 0 || view.contiguous()) return;
  // Dims in order of stride, each must step over the whole extent of the smaller ones.
  std::array<int, 3> dims = {0, 1, 2};
  std::sort(dims.begin(), dims.end(), [&](int a, int b) {
    return view.stride[a] != view.stride[b] ? view.stride[a] < view.stride[b]
                                            : view.shape[a] < view.shape[b];
  });
  int64_t extent = 1;
  for (const int dim : dims) {
    if (dim >= view.rank || view.shape[dim] <= 1) continue;
    if (view.stride[dim] < extent) {
      return Fail(absl::StrCat(field, " overlaps itself: shape ", ShapeText(view), ", strides ",
                               StrideText(view)));
    }
    extent += (view.shape[dim] - 1) * view.stride[dim];
  }
}

void ParamCheck::Gapless(const char* field, const TensorView& view) {
  if (status_.ok() && !view.contiguous()) {
    Fail(absl::StrCat(field, " has gaps: shape ", ShapeText(view), ", strides ", StrideText(view)));
  }
}

void ParamCheck::Dim(const char* field, const TensorView& view, int dim, int64_t expected,
                     absl::string_view meaning) {
  if (view.shape[dim] != expected) {
    Fail(absl::StrCat(field, " is ", ShapeText(view), ", dim ", dim, " must be ", expected, " (",
                      meaning, ")"));
  }
}

void ParamCheck::SameShape(const char* field, const TensorView& view, const char* other_field,
                           const TensorView& other) {
  if (view.rank != other.rank || view.shape != other.shape) {
    Fail(absl::StrCat(field, " is ", ShapeText(view), ", must be ", ShapeText(other), " as ",
                      other_field));
  }
}

void ParamCheck::NotEmpty(const char* field, const TensorView& view, int dim) {
  if (view.shape[dim] < 1) {
    Fail(absl::StrCat(field, " is ", ShapeText(view), ", dim ", dim, " must be at least 1"));
  }
}

void ParamCheck::Distinct(const char* field, const TensorView& view, const char* other_field,
                          const TensorView& other) {
  if (view.num_elements() > 0 && other.num_elements() > 0 && view.data == other.data) {
    Fail(absl::StrCat(field, " aliases ", other_field));
  }
}

void ParamCheck::DistinctOrSame(const char* field, const TensorView& view, const char* other_field,
                                const TensorView& other) {
  if (view.dtype != other.dtype || view.stride != other.stride) {
    Distinct(field, view, other_field, other);
  }
}

}  // namespace upipe::kernels
