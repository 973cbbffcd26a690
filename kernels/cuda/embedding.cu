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

// Rows of a block's part, of kBlockThreads that were looked at together, and their tokens.
struct CollectedRows {
  int offset[kBlockThreads];
  int32_t token[kBlockThreads];
  int warp_counts[kBlockThreads / kWarpThreads];
};

// Puts the rows among [first, first + kBlockThreads) whose token is of this block's part into
// `rows`, which is shared, ascending; returns how many.
__device__ int Collect(const EmbeddingBwd& p, int64_t first, CollectedRows& rows) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads;
  const int64_t row = first + thread;
  int32_t token = 0;
  bool mine = false;
  if (row < p.num_tokens) {
    token = p.tokens[row];
    mine = InVocabulary(token, p.vocab, row, p.fault) &&
           static_cast<unsigned>(token) % kVocabParts == blockIdx.y;
  }
  const unsigned votes = __ballot_sync(kAllLanes, mine);
  if (lane == 0) rows.warp_counts[thread / kWarpThreads] = __popc(votes);
  __syncthreads();
  int before = 0, count = 0;
  for (int warp = 0; warp < kBlockThreads / kWarpThreads; ++warp) {
    if (warp < thread / kWarpThreads) before += rows.warp_counts[warp];
    count += rows.warp_counts[warp];
  }
  if (mine) {
    const int place = before + __popc(votes & ((1u << lane) - 1));
    rows.offset[place] = thread;
    rows.token[place] = token;
  }
  __syncthreads();
  return count;
}

// A thread's columns of the row of dtable that it adds to: read when its token comes and written
// when another does, so that a token that follows itself waits for no memory but dout's.
template <int N>
struct OpenRow {
  float* at = nullptr;
  Vector<float, N> sum = {};

  __device__ void Open(float* to) {
    if (to == at) return;
    Close();
    at = to;
    sum = Load<N>(to);
  }
  __device__ void Close() {
    if (at != nullptr) Store(at, sum);
  }
};

constexpr int kRowsAhead = 16;  // of dout, on their way at once

// Grid (columns, part of the vocabulary): a block adds, in ascending order, the rows whose token is
// of its part to N columns per thread. Every block reads all tokens; dout is read once, dtable read
// and written at most once per token. 2080 bytes of shared memory.
template <typename S, int N>
__global__ void __launch_bounds__(kBlockThreads)
    embedding_bwd(EmbeddingBwd p, const S* dout, float* dtable) {
  UPIPE_SHARED(rows, CollectedRows);
  const int64_t column = (int64_t{blockIdx.x} * kBlockThreads + threadIdx.x) * N;
  OpenRow<N> open;
  for (int64_t first = 0; first < p.num_tokens; first += kBlockThreads) {
    const int count = Collect(p, first, rows);
    for (int k = 0; k < count && column < p.columns; k += kRowsAhead) {
      Vector<S, N> gradients[kRowsAhead];
      UPIPE_UNROLL
      for (int i = 0; i < kRowsAhead; ++i) {
        if (k + i >= count) break;
        gradients[i] = Load<N>(dout + (first + rows.offset[k + i]) * p.dout_stride + column);
      }
      UPIPE_UNROLL
      for (int i = 0; i < kRowsAhead; ++i) {
        if (k + i >= count) break;
        open.Open(dtable + rows.token[k + i] * p.dtable_stride + column);
        UPIPE_UNROLL
        for (int e = 0; e < N; ++e) open.sum.Set(e, open.sum[e] + gradients[i][e]);
      }
    }
  }
  open.Close();
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
