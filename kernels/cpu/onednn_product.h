// bf16 matrix products on AVX-512 BF16, by oneDNN. Its headers stay in the .cc.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/api/dtype.h"

namespace upipe::kernels::cpu {

// c = alpha * op(a) op(b) + beta * c + bias, fp32 sums, rounded once. op(a) [m, k] and op(b) [k, n]
// are bf16, c [m, n] is of c_type, bias [n] is bf16 or null, in which case alpha may differ from 1.
// Strides are in elements; m, n, k > 0.
struct OnednnProduct {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
  bool transpose_a = false, transpose_b = false;
  DType c_type = DType::kFloat32;
  float alpha = 1, beta = 0;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  void* c = nullptr;
};

// Runs on the calling thread alone. A product is compiled when its shapes, strides and factors are
// first seen in this process (up to some milliseconds and heap memory); later calls only look it
// up. False when it needs more than scratch_bytes of scratch: nothing was done then. Thread-safe.
// Internal when oneDNN refuses.
absl::StatusOr<bool> MultiplyOnednn(const OnednnProduct& product, void* scratch,
                                    int64_t scratch_bytes);

}  // namespace upipe::kernels::cpu
