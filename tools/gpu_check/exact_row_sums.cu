// Rows of attention and its gradients from the definition, in Real = double or, as the same loops
// in the precision that is tested, float with bf16 operands. Grid (piece of the row, row), block of
// 128 threads; shared memory: two rows and two tiles of weights. Every block reads its piece of K
// and V (or Q and dO) once: 4 head_dim bytes and 4 head_dim operations of Real for a pair.
#include <cuda_bf16.h>

#include "kernels/cuda/launch.h"
#include "tools/gpu_check/exact_row_sums.h"

namespace upipe::gpu_check {
namespace {

constexpr int kTile = 128;
constexpr int kMaxHeadDim = 256;
constexpr int kPerThread = kMaxHeadDim / kTile;

__device__ float Element(const void* data, int64_t index) {
  return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
}

// As an operand of a product in the tested precision.
__device__ double Operand(double x) { return x; }
__device__ float Operand(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ double Exp(double x) { return exp(x); }
__device__ float Exp(float x) { return expf(x); }

template <typename Real>
__device__ Real Dot(const Real* row, const void* data, int64_t begin, int head_dim) {
  Real sum = 0;
  for (int e = 0; e < head_dim; ++e) sum += row[e] * static_cast<Real>(Element(data, begin + e));
  return sum;
}

template <typename Real>
__device__ void LoadRow(Real* row, const void* data, int64_t begin, int head_dim) {
  for (int e = static_cast<int>(threadIdx.x); e < head_dim; e += kTile) {
    row[e] = static_cast<Real>(Element(data, begin + e));
  }
}

struct Range {
  int64_t begin, end;
};

__device__ int64_t Clamp(int64_t x, int64_t high) { return x < 0 ? 0 : x > high ? high : x; }

// The block's piece of what the row meets: keys of a query, queries of a key.
__device__ Range PieceOf(const RowSums& p, int64_t first, int64_t last, int64_t count) {
  first = Clamp(first, count);
  last = Clamp(last, count);
  const int64_t length = last > first ? last - first : 0;
  const int64_t piece = static_cast<int64_t>(blockIdx.x), pieces = p.num_pieces;
  return {first + length * piece / pieces, first + length * (piece + 1) / pieces};
}

__device__ Range KeysOf(const RowSums& p, int64_t query) {
  const int64_t at = p.query_begin + query - p.key_begin;
  return PieceOf(p, at - p.window + 1, at + 1, p.keys);
}

__device__ Range QueriesOf(const RowSums& p, int64_t key) {
  const int64_t at = p.key_begin + key - p.query_begin;
  return PieceOf(p, at, at + p.window, p.queries);
}

__device__ double* OutOf(const RowSums& p, int width) {
  const int64_t index = static_cast<int64_t>(blockIdx.y) * p.num_pieces + blockIdx.x;
  return p.out + index * width;
}

template <typename Real>
__global__ void exact_rows_fwd(const RowSums p) {
  UPIPE_SHARED(q, Real[kMaxHeadDim]);
  UPIPE_SHARED(weights, Real[kTile]);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t query = p.rows[blockIdx.y];
  const Range keys = KeysOf(p, query);
  LoadRow<Real>(q, p.q, query * p.q_stride, p.head_dim);
  __syncthreads();
  Real largest = -INFINITY, sum = 0, acc[kPerThread] = {};
  for (int64_t begin = keys.begin; begin < keys.end; begin += kTile) {
    const int columns = static_cast<int>(keys.end - begin < kTile ? keys.end - begin : kTile);
    const Real score = tid < columns ? static_cast<Real>(p.scale) *
                                           Dot<Real>(q, p.k, (begin + tid) * p.k_stride, p.head_dim)
                                     : static_cast<Real>(-INFINITY);
    weights[tid] = score;
    __syncthreads();
    Real next = largest;
    for (int j = 0; j < columns; ++j) next = weights[j] > next ? weights[j] : next;
    __syncthreads();
    weights[tid] = Exp(score - next);
    __syncthreads();
    const Real shrink = Exp(largest - next);
    largest = next;
    sum *= shrink;
    for (int j = 0; j < columns; ++j) sum += weights[j];
    for (int i = 0; i < kPerThread; ++i) {
      const int e = tid + i * kTile;
      if (e >= p.head_dim) break;
      acc[i] *= shrink;
      for (int j = 0; j < columns; ++j) {
        acc[i] +=
            Operand(weights[j]) * static_cast<Real>(Element(p.v, (begin + j) * p.v_stride + e));
      }
    }
    __syncthreads();
  }
  double* out = OutOf(p, p.head_dim + 2);
  if (tid == 0) out[0] = static_cast<double>(largest);
  if (tid == 0) out[1] = static_cast<double>(sum);
  for (int i = 0; i < kPerThread; ++i) {
    if (tid + i * kTile < p.head_dim) out[2 + tid + i * kTile] = static_cast<double>(acc[i]);
  }
}

template <typename Real>
__global__ void exact_rows_dq(const RowSums p) {
  UPIPE_SHARED(q, Real[kMaxHeadDim]);
  UPIPE_SHARED(dout, Real[kMaxHeadDim]);
  UPIPE_SHARED(weights, Real[kTile]);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t query = p.rows[blockIdx.y];
  const Range keys = KeysOf(p, query);
  LoadRow<Real>(q, p.q, query * p.q_stride, p.head_dim);
  LoadRow<Real>(dout, p.dout, query * p.dout_stride, p.head_dim);
  __syncthreads();
  const Real scale = p.scale, lse = p.lse[query], delta = p.delta[query * p.delta_stride];
  Real acc[kPerThread] = {};
  for (int64_t begin = keys.begin; begin < keys.end; begin += kTile) {
    const int columns = static_cast<int>(keys.end - begin < kTile ? keys.end - begin : kTile);
    if (tid < columns) {
      const int64_t key = begin + tid;
      const Real score = scale * Dot<Real>(q, p.k, key * p.k_stride, p.head_dim);
      const Real dp = Dot<Real>(dout, p.v, key * p.v_stride, p.head_dim);
      weights[tid] = Operand(Exp(score - lse) * (dp - delta));
    }
    __syncthreads();
    for (int i = 0; i < kPerThread; ++i) {
      const int e = tid + i * kTile;
      if (e >= p.head_dim) break;
      for (int j = 0; j < columns; ++j) {
        acc[i] += weights[j] * static_cast<Real>(Element(p.k, (begin + j) * p.k_stride + e));
      }
    }
    __syncthreads();
  }
  double* out = OutOf(p, p.head_dim);
  for (int i = 0; i < kPerThread; ++i) {
    if (tid + i * kTile < p.head_dim) out[tid + i * kTile] = static_cast<double>(scale * acc[i]);
  }
}

template <typename Real>
__global__ void exact_rows_dkv(const RowSums p) {
  UPIPE_SHARED(k, Real[kMaxHeadDim]);
  UPIPE_SHARED(v, Real[kMaxHeadDim]);
  UPIPE_SHARED(ds, Real[kTile]);
  UPIPE_SHARED(weights, Real[kTile]);
  const int tid = static_cast<int>(threadIdx.x);
  const int64_t key = p.rows[blockIdx.y];
  const Range queries = QueriesOf(p, key);
  LoadRow<Real>(k, p.k, key * p.k_stride, p.head_dim);
  LoadRow<Real>(v, p.v, key * p.v_stride, p.head_dim);
  __syncthreads();
  const Real scale = p.scale;
  Real dk[kPerThread] = {}, dv[kPerThread] = {};
  for (int64_t begin = queries.begin; begin < queries.end; begin += kTile) {
    const int rows = static_cast<int>(queries.end - begin < kTile ? queries.end - begin : kTile);
    if (tid < rows) {
      const int64_t query = begin + tid;
      const Real score = scale * Dot<Real>(k, p.q, query * p.q_stride, p.head_dim);
      const Real dp = Dot<Real>(v, p.dout, query * p.dout_stride, p.head_dim);
      const Real weight = Exp(score - static_cast<Real>(p.lse[query]));
      weights[tid] = Operand(weight);
      ds[tid] = Operand(weight * (dp - static_cast<Real>(p.delta[query * p.delta_stride])));
    }
    __syncthreads();
    for (int i = 0; i < kPerThread; ++i) {
      const int e = tid + i * kTile;
      if (e >= p.head_dim) break;
      for (int j = 0; j < rows; ++j) {
        dk[i] += ds[j] * static_cast<Real>(Element(p.q, (begin + j) * p.q_stride + e));
        dv[i] += weights[j] * static_cast<Real>(Element(p.dout, (begin + j) * p.dout_stride + e));
      }
    }
    __syncthreads();
  }
  double* out = OutOf(p, 2 * p.head_dim);
  for (int i = 0; i < kPerThread; ++i) {
    const int e = tid + i * kTile;
    if (e >= p.head_dim) break;
    out[e] = static_cast<double>(scale * dk[i]);
    out[p.head_dim + e] = static_cast<double>(dv[i]);
  }
}

dim3 GridOf(const RowSums& p) {
  return {static_cast<unsigned>(p.num_pieces), static_cast<unsigned>(p.num_rows)};
}

}  // namespace

void LaunchForwardRows(const RowSums& p, cudaStream_t stream) {
  const auto kernel = p.plain ? exact_rows_fwd<float> : exact_rows_fwd<double>;
  kernels::cuda::Launch(kernel, GridOf(p), dim3(kTile), 0, stream, p);
}

void LaunchQueryGradientRows(const RowSums& p, cudaStream_t stream) {
  const auto kernel = p.plain ? exact_rows_dq<float> : exact_rows_dq<double>;
  kernels::cuda::Launch(kernel, GridOf(p), dim3(kTile), 0, stream, p);
}

void LaunchKeyGradientRows(const RowSums& p, cudaStream_t stream) {
  const auto kernel = p.plain ? exact_rows_dkv<float> : exact_rows_dkv<double>;
  kernels::cuda::Launch(kernel, GridOf(p), dim3(kTile), 0, stream, p);
}

}  // namespace upipe::gpu_check
