// y = h * rstd * weight, h = x or x + residual, and its backward. A row is read from memory once:
// it waits in shared memory, as it is stored, until the sum over it is known; rows too wide for
// that are read again. [T, d] is seen as [T, 1, d].
#include <algorithm>

#include "kernels/cuda/column_partials.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/row_sum.cuh"

namespace upipe::kernels::cuda {
namespace {

// So that two blocks fit a multiprocessor; of 227 KiB.
constexpr int64_t kHeldBytesMax = 110 * 1024;

struct RowShape {
  int64_t num_rows, n1, columns;
  float eps;
  bool hold;  // rows in shared memory
};

__device__ float InverseRms(float sum_of_squares, const RowShape& shape) {
  return 1.0f / sqrtf(sum_of_squares / static_cast<float>(shape.columns) + shape.eps);
}

template <typename S, typename R>
struct Forward {
  RowShape shape;
  Rows<const S> x;
  const S* weight;
  Rows<S> y;
  Rows<const R> residual;  // null without
  Rows<S> sum;             // of residual
};

// blockDim (threads of a row, rows of a block), one grid block for so many rows; a row of S per
// blockDim.y in shared memory. Reads x and residual, writes sum and y, each once.
template <typename S, typename R, int N>
__global__ void __launch_bounds__(kBlockThreads) rms_norm_fwd(Forward<S, R> p) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  const bool live = row < p.shape.num_rows;
  const int64_t i = live ? row / p.shape.n1 : 0, j = live ? row % p.shape.n1 : 0;
  const int64_t step = int64_t{blockDim.x} * N;
  const int64_t end = live ? p.shape.columns : 0;
  S* const held = DynamicShared<S>() + threadIdx.y * p.shape.columns;
  float squares[1] = {};
  for (int64_t k = int64_t{threadIdx.x} * N; k < end; k += step) {
    Vector<S, N> h = Load<N>(p.x.At(i, j, k));
    if (p.residual.data != nullptr) {
      const auto residual = Load<N>(p.residual.At(i, j, k));
      UPIPE_UNROLL
      for (int e = 0; e < N; ++e) h.Set(e, h[e] + residual[e]);
      Store(p.sum.At(i, j, k), h);
    }
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) squares[0] = fmaf(h[e], h[e], squares[0]);
    if (p.shape.hold) Store(held + k, h);
  }
  RowSums(squares, static_cast<int>(blockDim.x));
  const float rstd = InverseRms(squares[0], p.shape);
  const S* again = p.residual.data != nullptr ? p.sum.At(i, j) : p.x.At(i, j);
  for (int64_t k = int64_t{threadIdx.x} * N; k < end; k += step) {
    const Vector<S, N> h = p.shape.hold ? Load<N>(held + k) : Load<N>(again + k);
    const Vector<S, N> weight = Load<N>(p.weight + k);
    Vector<S, N> y;
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) y.Set(e, h[e] * rstd * weight[e]);
    Store(p.y.At(i, j, k), y);
  }
}

template <typename S, typename D>
struct Backward {
  RowShape shape;
  int64_t rows_per_block;
  Rows<const S> x;
  const S* weight;
  Rows<const D> dy;
  Rows<S> dx;
  float* partials;  // [blocks, columns]: sums of dy * x * rstd
  bool accumulate;
};

// One row. Threads own columns, so nothing they keep in `total`, [columns] fp32, is shared.
template <typename S, typename D, int N>
__device__ void BackwardRow(const Backward<S, D>& p, int64_t row, bool live, S* held_x, D* held_dy,
                            float* total) {
  const int64_t i = live ? row / p.shape.n1 : 0, j = live ? row % p.shape.n1 : 0;
  const int64_t step = int64_t{blockDim.x} * N;
  const int64_t end = live ? p.shape.columns : 0;
  float sums[2] = {};  // of x^2 and of dy * weight * x
  for (int64_t k = int64_t{threadIdx.x} * N; k < end; k += step) {
    const auto x = Load<N>(p.x.At(i, j, k)), weight = Load<N>(p.weight + k);
    const auto dy = Load<N>(p.dy.At(i, j, k));
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) {
      sums[0] = fmaf(x[e], x[e], sums[0]);
      sums[1] = fmaf(dy[e] * weight[e], x[e], sums[1]);
    }
    if (p.shape.hold) {
      Store(held_x + k, x);
      Store(held_dy + k, dy);
    }
  }
  RowSums(sums, static_cast<int>(blockDim.x));
  const float rstd = InverseRms(sums[0], p.shape);
  const float factor = sums[1] / static_cast<float>(p.shape.columns) * rstd * rstd;
  for (int64_t k = int64_t{threadIdx.x} * N; k < end; k += step) {
    const auto x = p.shape.hold ? Load<N>(held_x + k) : Load<N>(p.x.At(i, j, k));
    const auto dy = p.shape.hold ? Load<N>(held_dy + k) : Load<N>(p.dy.At(i, j, k));
    const auto weight = Load<N>(p.weight + k);
    auto sum = Load<N>(total + k);
    Vector<S, N> dx;
    if (p.accumulate) dx = Load<N>(p.dx.At(i, j, k));
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) {
      const float gradient = rstd * (dy[e] * weight[e] - x[e] * factor);
      dx.Set(e, p.accumulate ? dx[e] + gradient : gradient);
      sum.Set(e, fmaf(dy[e], x[e] * rstd, sum[e]));
    }
    Store(p.dx.At(i, j, k), dx);
    Store(total + k, sum);
  }
}

// blockDim (threads of a row, rows at a time); a block goes through rows_per_block rows, ascending.
// Shared memory for every row at a time: its part of dweight, and x and dy of the row when held;
// without hold there is one row at a time and its part of dweight is the block's partial row.
// Reads x and dy, reads (accumulating) and writes dx, each once.
template <typename S, typename D, int N>
__global__ void __launch_bounds__(kBlockThreads) rms_norm_bwd(Backward<S, D> p) {
  const int64_t columns = p.shape.columns, step = int64_t{blockDim.x} * N;
  float* const partial = p.partials + blockIdx.x * columns;
  float* totals = p.shape.hold ? DynamicShared<float>() : partial;
  float* const total = totals + threadIdx.y * columns;
  D* const held_dy = reinterpret_cast<D*>(totals + blockDim.y * columns);
  S* const held_x = reinterpret_cast<S*>(held_dy + blockDim.y * columns);
  for (int64_t k = int64_t{threadIdx.x} * N; k < columns; k += step) {
    Vector<float, N> zero;
    UPIPE_UNROLL
    for (int e = 0; e < N; ++e) zero.Set(e, 0);
    Store(total + k, zero);
  }
  const int64_t first = blockIdx.x * p.rows_per_block;
  const int64_t last = min(p.shape.num_rows, first + p.rows_per_block);
  for (int64_t row = first; row < last; row += blockDim.y) {
    BackwardRow<S, D, N>(p, row + threadIdx.y, row + threadIdx.y < last,
                         held_x + threadIdx.y * columns, held_dy + threadIdx.y * columns, total);
  }
  if (!p.shape.hold) return;
  __syncthreads();
  const int64_t thread = int64_t{threadIdx.y} * blockDim.x + threadIdx.x;
  for (int64_t k = thread; k < columns; k += kBlockThreads) {
    float sum = totals[k];
    for (unsigned y = 1; y < blockDim.y; ++y) sum += totals[y * columns + k];
    partial[k] = sum;
  }
}

// How a block holds its rows: what fits as RowBlock has it, then fewer rows, then not at all.
struct Held {
  dim3 block;
  size_t bytes;
  bool hold;
};
Held HeldRows(int64_t columns, int width, int64_t element_bytes) {
  dim3 block = RowBlock(columns, width);
  const auto bytes = [&] { return int64_t{block.y} * columns * element_bytes; };
  while (block.y > 1 && bytes() > kHeldBytesMax) block = dim3(2 * block.x, block.y / 2);
  if (bytes() > kHeldBytesMax) return {block, 0, false};
  return {block, static_cast<size_t>(bytes()), true};
}

RowShape ShapeOf(const TensorView& x, float eps) {
  return {x.shape[0] * x.shape[1], x.shape[1], x.shape[2], eps, true};
}

template <typename S, typename R>
void RunForward(const RmsNormFwdParams& p, bool aligned, const LaunchContext& context) {
  WithWidth<S>(aligned, [&](auto width) {
    constexpr int kN = decltype(width)::value;
    Forward<S, R> forward = {ShapeOf(p.x, p.eps),         RowsOf<const S>(p.x),
                             p.weight.as<const S>(),      RowsOf<S>(p.y),
                             RowsOf<const R>(p.residual), RowsOf<S>(p.sum)};
    const Held held = HeldRows(forward.shape.columns, kN, sizeof(S));
    forward.shape.hold = held.hold;
    Launch(rms_norm_fwd<S, R, kN>, NumBlocks(forward.shape.num_rows, held.block.y), held.block,
           held.bytes, context.stream, forward);
  });
}

template <typename S, typename D>
void RunBackward(const RmsNormBwdParams& p, bool aligned, float* partials,
                 const LaunchContext& context) {
  const RowShape shape = ShapeOf(p.x, p.eps);
  const RowBlocks blocks = ReductionBlocks(shape.num_rows);
  WithWidth<S>(aligned, [&](auto width) {
    constexpr int kN = decltype(width)::value;
    Backward<S, D> backward = {shape,
                               blocks.rows_per_block,
                               RowsOf<const S>(p.x),
                               p.weight.as<const S>(),
                               RowsOf<const D>(p.dy),
                               RowsOf<S>(p.dx),
                               partials,
                               p.accumulate};
    const Held held = HeldRows(shape.columns, kN, sizeof(float) + sizeof(S) + sizeof(D));
    backward.shape.hold = held.hold;
    Launch(rms_norm_bwd<S, D, kN>, static_cast<unsigned>(blocks.num_blocks), held.block, held.bytes,
           context.stream, backward);
  });
  AddPartialRows(partials, blocks.num_blocks, shape.columns, p.dweight.as<float>(), context);
}

}  // namespace

void Run(const RmsNormFwdParams& params, Workspace, const LaunchContext& context) {
  RmsNormFwdParams p = params;
  for (TensorView* view : {&p.x, &p.y, &p.residual, &p.sum}) {
    if (view->present()) *view = view->AsTensor3();
  }
  const bool aligned = RowsAligned({p.x, p.weight, p.y, p.residual, p.sum}, WidthOf(p.x.dtype));
  const DType residual = p.residual.present() ? p.residual.dtype : p.x.dtype;
  if (p.x.dtype == DType::kFloat32) return RunForward<float, float>(p, aligned, context);
  if (residual == DType::kFloat32) return RunForward<__nv_bfloat16, float>(p, aligned, context);
  RunForward<__nv_bfloat16, __nv_bfloat16>(p, aligned, context);
}

void Run(const RmsNormBwdParams& params, Workspace workspace, const LaunchContext& context) {
  RmsNormBwdParams p = params;
  for (TensorView* view : {&p.x, &p.dy, &p.dx}) *view = view->AsTensor3();
  const bool aligned = RowsAligned({p.x, p.weight, p.dy, p.dx}, WidthOf(p.x.dtype));
  float* partials = static_cast<float*>(workspace.data);
  if (p.x.dtype == DType::kFloat32) return RunBackward<float, float>(p, aligned, partials, context);
  if (p.dy.dtype == DType::kFloat32) {
    return RunBackward<__nv_bfloat16, float>(p, aligned, partials, context);
  }
  RunBackward<__nv_bfloat16, __nv_bfloat16>(p, aligned, partials, context);
}

}  // namespace upipe::kernels::cuda
