// Element types of tensors that cross the OpTable.
#pragma once

#include <cstdint>

namespace upipe::kernels {

enum class DType : uint8_t { kFloat32, kFloat64, kInt32, kInt64, kBFloat16 };

constexpr int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kBFloat16:
      return 2;
    default:
      return 4;
  }
}

constexpr const char* NameOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "fp32";
    case DType::kFloat64:
      return "fp64";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kBFloat16:
      return "bf16";
  }
  return "?";
}

}  // namespace upipe::kernels
