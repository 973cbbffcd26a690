// Ops that only move, fill or draw elements.
#include <cstring>

#include "kernels/api/counter_normal.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {

absl::Status Backend::Run(const StridedCopyParams& p, Workspace, ExecContext&) {
  for (int64_t i = 0; i < p.src.shape[0]; ++i) {
    for (int64_t j = 0; j < p.src.shape[1]; ++j) {
      for (int64_t k = 0; k < p.src.shape[2]; ++k) {
        if (p.accumulate) {
          At(p.dst, i, j, k) += At(p.src, i, j, k);
        } else if (p.dst.dtype == p.src.dtype) {
          std::memcpy(p.dst.At(i, j, k), p.src.At(i, j, k), SizeOf(p.src.dtype));
        } else {
          At(p.dst, i, j, k) = At(p.src, i, j, k);
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const FillParams& p, Workspace, ExecContext&) {
  for (int64_t i = 0; i < p.dst.shape[0]; ++i) {
    for (int64_t j = 0; j < p.dst.shape[1]; ++j) {
      for (int64_t k = 0; k < p.dst.shape[2]; ++k) {
        void* element = p.dst.At(i, j, k);
        switch (p.dst.dtype) {
          case DType::kFloat32:
          case DType::kBFloat16:
            At(p.dst, i, j, k) = p.value;
            break;
          case DType::kFloat64:
            *static_cast<double*>(element) = p.value;
            break;
          case DType::kInt32:
            *static_cast<int32_t*>(element) = p.value;
            break;
          case DType::kInt64:
            *static_cast<int64_t*>(element) = p.value;
            break;
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const RandomNormalParams& p, Workspace, ExecContext&) {
  for (int64_t i = 0; i < p.dst.shape[0]; ++i) {
    At(p.dst, i) = p.stddev * CounterNormal(p.seed, p.tensor_id, p.first_index + i);
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
