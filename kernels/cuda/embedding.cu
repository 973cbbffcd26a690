// Token lookup and its scatter-add. A token outside the vocabulary is reported and skipped.
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"
#include "kernels/cuda/report_fault.cuh"
#include "kernels/cuda/row_sum.cuh"

namespace upipe::kernels::cuda {
namespace {

__device__ bool InVocabulary(int32_t token, int64_t vocab, int64_t row, int64_t* fault) {
  if (token >= 0 && token < vocab) return true;
  ReportFault(fault, FaultKind::kEmbeddingToken, vocab, row, token);
  return false;
}

// Grid and blocks are those of RowTiling for [1, tokens, d]. Reads and writes d elements a token.
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    embedding_fwd(RowTiling tiling, const int32_t* tokens, Rows<const S> table, int64_t vocab,
                  Rows<S> out, int64_t* fault) {
  MoveRows(
      tiling,
      [&](int64_t, int64_t t, int64_t v) {
        const int32_t token = tokens[t];
        if (!InVocabulary(token, vocab, t, fault)) return Vector<S, N>{};
        return Load<N>(table.At(0, token, v * N));
      },
      [&](int64_t, int64_t t, int64_t v, const Vector<S, N>& row) {
        Store(out.At(0, t, v * N), row);
      });
}

// Parts of the vocabulary: a token belongs to that of its remainder.
constexpr int kVocabParts = 264;

struct EmbeddingBwd {
  const int32_t* tokens;
  int64_t num_tokens, vocab, columns;
  int64_t dout_stride, dtable_stride;
  int64_t* fault;
};

// Puts the rows among [first, first + kBlockThreads) whose token is of this block's part into
// `rows`, ascending; returns how many. `warp_counts` is shared.
__device__ int Collect(const EmbeddingBwd& p, int64_t first, int* rows, int* warp_counts) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads;
  const int64_t row = first + thread;
  bool mine = false;
  if (row < p.num_tokens) {
    const int32_t token = p.tokens[row];
    mine = InVocabulary(token, p.vocab, row, p.fault) &&
           static_cast<unsigned>(token) % kVocabParts == blockIdx.y;
  }
  const unsigned votes = __ballot_sync(kAllLanes, mine);
  if (lane == 0) warp_counts[thread / kWarpThreads] = __popc(votes);
  __syncthreads();
  int before = 0, count = 0;
  for (int warp = 0; warp < kBlockThreads / kWarpThreads; ++warp) {
    if (warp < thread / kWarpThreads) before += warp_counts[warp];
    count += warp_counts[warp];
  }
  if (mine) rows[before + __popc(votes & ((1u << lane) - 1))] = thread;
  __syncthreads();
  return count;
}

// Grid (columns, part of the vocabulary): a block adds, in ascending order, the rows whose token is
// of its part to N columns per thread. Every block reads all tokens; dout is read once, dtable read
// and written once per token. 1056 bytes of shared memory.
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    embedding_bwd(EmbeddingBwd p, const S* dout, float* dtable) {
  UPIPE_SHARED(rows, int[kBlockThreads]);
  UPIPE_SHARED(warp_counts, int[kBlockThreads / kWarpThreads]);
  const int64_t column = (int64_t{blockIdx.x} * kBlockThreads + threadIdx.x) * N;
  for (int64_t first = 0; first < p.num_tokens; first += kBlockThreads) {
    const int count = Collect(p, first, rows, warp_counts);
    for (int k = 0; k < count && column < p.columns; ++k) {
      const int64_t row = first + rows[k];
      float* const to = dtable + p.tokens[row] * p.dtable_stride + column;
      const auto gradient = Load<N>(dout + row * p.dout_stride + column);
      auto sum = Load<N>(to);
      UPIPE_UNROLL
      for (int e = 0; e < N; ++e) sum.Set(e, sum[e] + gradient[e]);
      Store(to, sum);
    }
  }
}

// [rows, d] as [1, rows, d].
TensorView OneRowOfRows(const TensorView& view) {
  return TensorView::Tensor3(view.data, view.dtype, {1, view.shape[0], view.shape[1]}, 0,
                             view.stride[0]);
}

}  // namespace

void Run(const EmbeddingFwdParams& p, Workspace, const LaunchContext& context) {
  const TensorView out = OneRowOfRows(p.out), table = OneRowOfRows(p.table);
  WithStorageType(p.out.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    WithWidth<S>(RowsAligned({out, table}, WidthOf(p.out.dtype)), [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const RowTiling tiling = TileRows(out, kN);
      Launch(embedding_fwd<S, kN>, tiling.num_blocks, BlockOf(tiling), 0, context.stream, tiling,
             p.tokens.as<const int32_t>(), RowsOf<const S>(table), p.table.shape[0], RowsOf<S>(out),
             context.fault);
    });
  });
}

void Run(const EmbeddingBwdParams& p, Workspace, const LaunchContext& context) {
  const EmbeddingBwd shape = {p.tokens.as<const int32_t>(),
                              p.tokens.shape[0],
                              p.dtable.shape[0],
                              p.dtable.shape[1],
                              p.dout.stride[0],
                              p.dtable.stride[0],
                              context.fault};
  WithStorageType(p.dout.dtype, [&](auto type) {
    using S = typename decltype(type)::type;
    // Four columns a thread: more blocks share the columns of a token that is everywhere.
    constexpr int kWidth = WidthOf(DType::kFloat32);
    WithWidth<float>(RowsAligned({p.dout, p.dtable}, kWidth), [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const dim3 grid(NumBlocks(shape.columns, kBlockThreads * kN), kVocabParts);
      Launch(embedding_bwd<S, kN>, grid, kBlockThreads, 0, context.stream, shape,
             p.dout.as<const S>(), p.dtable.as<float>());
    });
  });
}

}  // namespace upipe::kernels::cuda
