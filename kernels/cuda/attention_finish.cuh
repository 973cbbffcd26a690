// How the sums of one query over the keys of a run leave: as its output and log-sum-exp, alone or
// joined to what o and lse hold over other keys (op_params.h, merge).
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/elements.cuh"

namespace upipe::kernels::cuda {

// The two results of a call. o is fp32 where `wide`, else bf16; strides in elements.
struct ForwardResults {
  void* o;
  int64_t o_row_stride;
  int64_t o_head_stride;
  Rows<float> lse;  // rows are queries
  bool wide;
  bool merge;

  __device__ int64_t Offset(int64_t row, int64_t head) const {
    return row * o_row_stride + head * o_head_stride;
  }
  // o is fp32 or bf16.
  __device__ void Store(int64_t offset, float value) const {
    if (wide) {
      static_cast<float*>(o)[offset] = value;
    } else {
      static_cast<__nv_bfloat16*>(o)[offset] = FromFloat<__nv_bfloat16>(value);
    }
  }
};

// lse of the run joined to `before`, and the weights of o: kept * o + fresh * sums. Without
// merge, and where kept is 0, o is not to be read. `top` is the largest score, `sum` that of
// e^(score - top), above 0. Weights are exponentials of differences from the larger log-sum-exp, so
// none exceeds 1.
struct RowWeights {
  float lse;
  float kept;
  float fresh;
};

__device__ __forceinline__ RowWeights JoinRun(double top, float sum, float before) {
  const double run = top + static_cast<double>(logf(sum)), old = before;
  const double larger = run < old ? old : run;
  const float kept = expf(static_cast<float>(old - larger));
  const float fresh = expf(static_cast<float>(run - larger));
  const float total = kept + fresh;
  return {static_cast<float>(larger + static_cast<double>(logf(total))), kept / total,
          fresh / (total * sum)};
}

}  // namespace upipe::kernels::cuda
