// Joins two results of attention over different keys, in one pass: reads part and o, writes o. A
// row, one query of one head, has a group of threads; blockDim is (threads of a row, rows).
#include "kernels/cuda/attention_merge.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/softmax.cuh"

namespace upipe::kernels::cuda {
namespace {

struct MergeShape {
  int64_t num_rows, heads, columns;
  const float* part_lse;
  int64_t part_lse_stride;
  float* lse;
  int64_t lse_stride;
};

template <int N>
__global__ void __launch_bounds__(kBlockThreads)
    attention_merge(MergeShape p, Rows<const __nv_bfloat16> part, Rows<float> o) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool live = row < p.num_rows;
  const int64_t t = live ? row / p.heads : 0, head = live ? row % p.heads : 0;
  float* const lse = p.lse + head * p.lse_stride + t;
  const float part_lse = live ? p.part_lse[head * p.part_lse_stride + t] : -INFINITY;
  const float before = live ? *lse : 0;
  __syncthreads();  // every thread of the row has read its log-sum-exp
  if (part_lse == -INFINITY) return;
  const LogSumExpMerge merge = MergeLogSumExp(before, part_lse);
  if (threadIdx.x == 0) *lse = merge.lse;
  const int64_t step = int64_t{blockDim.x} * N;
  for (int64_t k = int64_t{threadIdx.x} * N; k < p.columns; k += step) {
    const auto more = Load<N>(part.At(t, head, k));
    Vector<float, N> sum = {};
    if (merge.weight_a != 0) sum = Load<N>(o.At(t, head, k));
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) sum.Set(e, merge.weight_a * sum[e] + merge.weight_b * more[e]);
    Store(o.At(t, head, k), sum);
  }
}

}  // namespace

void Run(const AttentionMergeParams& p, const LaunchContext& context) {
  const MergeShape shape = {
      p.o.shape[0] * p.o.shape[1], p.o.shape[1],      p.o.shape[2],   p.part_lse.as<const float>(),
      p.part_lse.stride[0],        p.lse.as<float>(), p.lse.stride[0]};
  WithWidth<__nv_bfloat16>(RowsAligned({p.part, p.o}, WidthOf(p.part.dtype)), [&](auto width) {
    constexpr int kN = decltype(width)::value;
    const dim3 block = RowBlock(shape.columns, kN);
    Launch(attention_merge<kN>, NumBlocks(shape.num_rows, block.y), block, 0, context.stream, shape,
           RowsOf<const __nv_bfloat16>(p.part), RowsOf<float>(p.o));
  });
}

}  // namespace upipe::kernels::cuda
