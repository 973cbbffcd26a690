// Sums along rows (row dot products) and over rows (column sums). Every element is read once.
#include "kernels/cuda/column_partials.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/row_sum.cuh"

namespace upipe::kernels::cuda {
namespace {

struct RowDotShape {
  int64_t num_rows, n1, columns;
  int64_t out_stride0, out_stride1;
};

// blockDim (threads of a row, rows of a block).
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    row_dot(RowDotShape shape, Rows<const S> a, Rows<const S> b, float* out) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool live = row < shape.num_rows;
  const int64_t i = live ? row / shape.n1 : 0, j = live ? row % shape.n1 : 0;
  float sum[1] = {};
  for (int64_t k = int64_t{threadIdx.x} * N; live && k < shape.columns;
       k += int64_t{blockDim.x} * N) {
    const auto x = Load<N>(a.At(i, j, k)), y = Load<N>(b.At(i, j, k));
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) sum[0] = fmaf(x[e], y[e], sum[0]);
  }
  RowSums(sum, static_cast<int>(blockDim.x));
  if (live && threadIdx.x == 0) out[i * shape.out_stride0 + j * shape.out_stride1] = sum[0];
}

// Grid (columns, blocks of rows); a thread adds up N columns of its block's rows, ascending.
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    column_sum(const S* x, int64_t stride, int64_t num_rows, int64_t columns,
               int64_t rows_per_block, float* partials) {
  const int64_t column = (int64_t{blockIdx.x} * kBlockThreads + threadIdx.x) * N;
  if (column >= columns) return;
  const int64_t first = blockIdx.y * rows_per_block;
  const int64_t last = min(num_rows, first + rows_per_block);
  Vector<float, N> sum;
  UPIPE_UNROLL
  for (int e = 0; e < N; ++e) sum.Set(e, 0);
  for (int64_t row = first; row < last; ++row) {
    const auto values = Load<N>(x + row * stride + column);
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) sum.Set(e, sum[e] + values[e]);
  }
  Store(partials + blockIdx.y * columns + column, sum);
}

constexpr int kPartialColumns = 32, kPartialGroups = kBlockThreads / kPartialColumns;

// Block (column, group of partial rows); a thread adds up its group's rows, the first group's
// threads add up the groups, ascending. 1 KiB of shared memory.
__global__ void __launch_bounds__(kBlockThreads)
    add_partial_rows(const float* partials, int64_t num_partials, int64_t columns, float* out) {
  UPIPE_SHARED(sums, float[kPartialGroups][kPartialColumns]);
  const int64_t column = int64_t{blockIdx.x} * kPartialColumns + threadIdx.x;
  const int64_t rows_per_group = (num_partials + kPartialGroups - 1) / kPartialGroups;
  const int64_t first = threadIdx.y * rows_per_group;
  const int64_t last = min(num_partials, first + rows_per_group);
  float sum = 0;
  for (int64_t row = first; row < last && column < columns; ++row) {
    sum += partials[row * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int group = 1; group < kPartialGroups; ++group) sum += sums[group][threadIdx.x];
  out[column] += sum;
}

}  // namespace

void Run(const RowDotParams& p, Workspace, const LaunchContext& context) {
  const int64_t columns = p.a.shape[2], num_rows = p.a.shape[0] * p.a.shape[1];
  const RowDotShape shape = {num_rows, p.a.shape[1], columns, p.out.stride[0], p.out.stride[1]};
  WithStorageType(p.a.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    WithWidth<S>(RowsAligned({p.a, p.b}, WidthOf(p.a.dtype)), [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const dim3 block = RowBlock(columns, kN);
      Launch(row_dot<S, kN>, NumBlocks(num_rows, block.y), block, 0, context.stream, shape,
             RowsOf<const S>(p.a), RowsOf<const S>(p.b), p.out.as<float>());
    });
  });
}

void Run(const ColumnSumParams& p, Workspace workspace, const LaunchContext& context) {
  const int64_t num_rows = p.x.shape[0], columns = p.x.shape[1];
  const RowBlocks blocks = ReductionBlocks(num_rows);
  float* partials = static_cast<float*>(workspace.data);
  WithStorageType(p.x.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    WithWidth<S>(RowsAligned({p.x}, WidthOf(p.x.dtype)), [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const dim3 grid(NumBlocks(columns, kBlockThreads * kN),
                      static_cast<unsigned>(blocks.num_blocks));
      Launch(column_sum<S, kN>, grid, kBlockThreads, 0, context.stream, p.x.as<const S>(),
             p.x.stride[0], num_rows, columns, blocks.rows_per_block, partials);
    });
  });
  AddPartialRows(partials, blocks.num_blocks, columns, p.out.as<float>(), context);
}

void AddPartialRows(const float* partials, int64_t num_partials, int64_t columns, float* out,
                    const LaunchContext& context) {
  if (num_partials == 0) return;
  Launch(add_partial_rows, NumBlocks(columns, kPartialColumns),
         dim3(kPartialColumns, kPartialGroups), 0, context.stream, partials, num_partials, columns,
         out);
}

}  // namespace upipe::kernels::cuda
