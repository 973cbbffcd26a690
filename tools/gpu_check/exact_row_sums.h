// The kernels behind exact_rows.h: plain parameters, partial sums of pieces of each row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace upipe::gpu_check {

// One head. Row i of a tensor begins `stride` elements after row i - 1; all are bf16 but lse and
// delta, fp32. Query i is at position query_begin + i, key j at key_begin + j; a query sees a key
// when 0 <= query - key < window.
struct RowSums {
  const void* q;
  const void* k;
  const void* v;
  const void* dout;
  int64_t q_stride, k_stride, v_stride, dout_stride;
  const float* lse;    // [queries]
  const float* delta;  // [queries], delta_stride apart
  int64_t delta_stride;
  int64_t queries, keys, query_begin, key_begin, window;
  int32_t head_dim;  // at most 256
  float scale;
  const int64_t* rows;  // [num_rows] on the device
  int32_t num_rows, num_pieces;
  bool plain;   // fp32 sums and bf16 operands, in place of double
  double* out;  // [num_rows, num_pieces, ...] on the device
};

// out [.., head_dim + 2]: largest score, sum of e^(score - largest), sum of e^(..) v.
void LaunchForwardRows(const RowSums& p, cudaStream_t stream);
// out [.., head_dim]: dq.
void LaunchQueryGradientRows(const RowSums& p, cudaStream_t stream);
// out [.., 2 head_dim]: dk and dv.
void LaunchKeyGradientRows(const RowSums& p, cudaStream_t stream);

}  // namespace upipe::gpu_check
