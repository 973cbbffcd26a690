// Element types of tensors that cross the OpTable.
#pragma once

#include <cstdint>

namespace upipe::kernels {

enum class DType : uint8_t { kFloat32, kFloat64, kInt32, kInt64 };

constexpr int64_t SizeOf(DType dtype) {
  return dtype == DType::kFloat64 || dtype == DType::kInt64 ? 8 : 4;
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
  }
  return "?";
}

}  // namespace upipe::kernels
