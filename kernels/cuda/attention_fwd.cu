// Attention forward, the own kernels: tiles on tensor cores for bf16 whose rows can be copied 16
// bytes at a time, a plain kernel for everything else. Both write every result once, from one
// thread, after sums in a fixed order.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <functional>

#include "kernels/cuda/attention_finish.cuh"
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_mask.cuh"
#include "kernels/cuda/attention_plain.cuh"
#include "kernels/cuda/attention_tile.cuh"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.h"

namespace upipe::kernels::cuda {
namespace {

template <typename T>
struct ForwardArgs {
  Rows<const T> q, k, v;
  ForwardResults results;
  int32_t head_dim;
  float scale;
  LaunchHeads heads;
  LaunchRows rows;
};
static_assert(sizeof(ForwardArgs<float>) <= 4096, "kernel parameters of every GPU");

constexpr float kHidden = -INFINITY;

// Shape of the tiled kernel for head sizes up to kDim.
template <int kDim>
struct ForwardTiles {
  // 16-row blocks of a warp: two where registers hold their output.
  static constexpr int kRowBlocks = kDim <= 128 ? 2 : 1;
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kThreads = kAttentionTileRows / kWarpRows * 32;
  static constexpr int kBlocksPerMultiprocessor = kDim <= 128 ? 2 : 1;
  static constexpr int kKeys = 64;
  static constexpr int kQueryBytes = kTileBytes<kAttentionTileRows, kDim>;
  static constexpr int kKeyBytes = kTileBytes<kKeys, kDim>;
  // q, two stages of k and of v, the mask.
  static constexpr int kSharedBytes =
      kQueryBytes + 4 * kKeyBytes + static_cast<int>(sizeof(TileMask));
};

// Multiplies the tile of q by `factor`, which is 0 or -1: exact in bf16.
template <int kThreads>
__device__ void ScaleQueries(char* tile, int bytes, float factor) {
  auto* numbers = reinterpret_cast<__nv_bfloat16*>(tile);
  for (int i = threadIdx.x; i < bytes / kBf16Bytes; i += kThreads) {
    numbers[i] = __float2bfloat16_rn(__bfloat162float(numbers[i]) * factor);
  }
}

// What a lane keeps of its rows: base-2 score that all weights are relative to, and its share of
// the sum of weights. Rows g and g + 8 of each block.
template <int kRowBlocks>
struct RunningRows {
  float top[kRowBlocks][2];
  float sum[kRowBlocks][2];
};

// Scores become weights 2^(score * factor - top) under the new top; the output so far shrinks with
// it, where the top of any row of the warp moved.
template <int kRowBlocks, int kColumns, int kOut>
__device__ __forceinline__ void Softmax(float factor, float (&scores)[kRowBlocks][kColumns][4],
                                        RunningRows<kRowBlocks>& rows,
                                        float (&out)[kRowBlocks][kOut][4]) {
  float shrink[kRowBlocks][2];
  bool moved = false;
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int half = 0; half < 2; ++half) {
      float top = kHidden;
      UPIPE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      top = fmaxf(rows.top[m][half], top * factor);
      // A row that has seen no key yet keeps -infinity; zero stands in so that no difference is
      // NaN.
      const float shift = top == kHidden ? 0.0f : top;
      shrink[m][half] = Exp2(rows.top[m][half] - shift);
      moved = moved || top != rows.top[m][half];
      rows.top[m][half] = top;
      float sum = 0;
      UPIPE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        UPIPE_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& score = scores[m][n][2 * half + e];
          score = Exp2(score * factor - shift);
          sum += score;
        }
      }
      rows.sum[m][half] = rows.sum[m][half] * shrink[m][half] + sum;
    }
  }
  if (!__any_sync(0xffffffffu, moved)) return;
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int n = 0; n < kOut; ++n) {
      UPIPE_UNROLL
      for (int e = 0; e < 4; ++e) out[m][n][e] *= shrink[m][e / 2];
    }
  }
}

// Writes the 16 rows of one block of a warp.
template <int kOut>
__device__ __forceinline__ void StoreBlock(const ForwardResults& results, int head_dim, int64_t row,
                                           int64_t end_row, int head, const float (&top)[2],
                                           const float (&sums)[2], const float (&out)[kOut][4]) {
  const int lane = threadIdx.x % 32;
  UPIPE_UNROLL
  for (int half = 0; half < 2; ++half) {
    float sum = sums[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int64_t i = row + half * 8 + lane / 4;
    const bool inside = i < end_row;
    float* lse = results.lse.At(inside ? i : row, head);
    const float before = inside && results.merge ? *lse : kHidden;
    __syncwarp();
    if (!inside || (sum == 0 && results.merge)) continue;
    RowWeights weights = {kHidden, 0, 0};
    if (sum != 0) weights = JoinRun(static_cast<double>(top[half]) * kLn2, sum, before);
    if (lane % 4 == 0) *lse = weights.lse;
    const int64_t offset = results.Offset(i, head) + lane % 4 * 2;
    UPIPE_UNROLL
    for (int n = 0; n < kOut; ++n) {
      if (n * 8 >= head_dim) break;
      float2 pair = {0, 0};
      if (sum != 0) {
        pair = {out[n][2 * half] * weights.fresh, out[n][2 * half + 1] * weights.fresh};
      }
      if (!results.wide) {
        auto* narrow = static_cast<__nv_bfloat16*>(results.o) + offset + n * 8;
        *reinterpret_cast<uint32_t*>(narrow) = PackBf16(pair.x, pair.y);
        continue;
      }
      auto* wide = reinterpret_cast<float2*>(static_cast<float*>(results.o) + offset + n * 8);
      if (results.merge && weights.kept != 0) {
        pair.x += weights.kept * wide->x;
        pair.y += weights.kept * wide->y;
      }
      *wide = pair;
    }
  }
}

// o = 0 and lse = -infinity for the rows of a tile that see no key.
__device__ void StoreUnseen(const ForwardResults& results, int head_dim, int64_t first_row,
                            int num_rows, int head) {
  for (int i = threadIdx.x; i < num_rows; i += blockDim.x) {
    *results.lse.At(first_row + i, head) = kHidden;
  }
  for (int i = threadIdx.x; i < num_rows * head_dim; i += blockDim.x) {
    results.Store(results.Offset(first_row + i / head_dim, head) + i % head_dim, 0.0f);
  }
}

// One tile of 128 queries of one head, 4 warps of 32 rows (8 of 16 above head size 128); keys pass
// by in tiles of 64, k and v double-buffered by cp.async, one barrier per tile. Scores, weights and
// output stay in registers; the weights of the first product are the left operand of the second.
// Grid: [tiles, heads]; the last tiles, which see most under a causal mask, start first.
// Shared bytes: 256 kDim (q) + 512 kDim (k, v) + 2 KiB (mask): 98 KiB at 128, two blocks per
// multiprocessor. Per visible pair 4 head_dim FLOPs; from memory at least 2 head_dim (2 queries + 2
// visible keys) bytes a head, from L2 4 head_dim bytes per key and tile: 128 FLOPs a byte. Left
// operands are read for 64 keys, right ones for 32 rows: 1.25 clocks of shared memory a product.
template <int kDim>
__global__ void __launch_bounds__(ForwardTiles<kDim>::kThreads,
                                  ForwardTiles<kDim>::kBlocksPerMultiprocessor)
    attention_fwd_tiled(const __grid_constant__ ForwardArgs<__nv_bfloat16> args) {
  using Tiles = ForwardTiles<kDim>;
  constexpr int kRowBlocks = Tiles::kRowBlocks, kKeys = Tiles::kKeys;
  char* const shared = DynamicShared<char>();
  auto& mask = *reinterpret_cast<TileMask*>(shared + Tiles::kQueryBytes + 4 * Tiles::kKeyBytes);
  const SharedAddress q_tile = AddressInShared(shared), k_tiles = q_tile + Tiles::kQueryBytes,
                      v_tiles = k_tiles + 2 * Tiles::kKeyBytes;
  const int head = args.heads.first_head + blockIdx.y, slot = args.heads.kv_slot[blockIdx.y];
  const int64_t first_row =
      args.rows.first_row + int64_t{gridDim.x - 1 - blockIdx.x} * kAttentionTileRows;
  mask.Fill(args.rows, first_row);
  const Span keys = mask.Columns();
  if (keys.begin == keys.end) {
    if (!args.results.merge) {
      StoreUnseen(args.results, args.head_dim, first_row, mask.num_rows, head);
    }
    return;
  }

  const auto copy_keys = [&](int64_t first, int stage) {
    CopyTile<kKeys, kDim, Tiles::kThreads>(args.k, slot, first, keys, args.head_dim,
                                           k_tiles + stage * Tiles::kKeyBytes);
    CopyTile<kKeys, kDim, Tiles::kThreads>(args.v, slot, first, keys, args.head_dim,
                                           v_tiles + stage * Tiles::kKeyBytes);
    CommitCopies();
  };
  CopyTile<kAttentionTileRows, kDim, Tiles::kThreads>(
      args.q, head, first_row, {first_row, first_row + mask.num_rows}, args.head_dim, q_tile);
  copy_keys(keys.begin, 0);
  if (args.scale <= 0) {
    WaitForCopies<0>();
    __syncthreads();
    ScaleQueries<Tiles::kThreads>(shared, Tiles::kQueryBytes, args.scale < 0 ? -1.0f : 0.0f);
  }
  const float factor = (args.scale == 0 ? 1.0f : fabsf(args.scale)) * kLog2E;

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tiles::kWarpRows;
  const auto q = LeftBlocks<kDim>(q_tile + warp_row * kDim * kBf16Bytes);
  const auto k = RightBlocks<kDim>(k_tiles);
  const auto v = LeftBlocks<kDim>(v_tiles);
  float out[kRowBlocks][kDim / 8][4];
  SetZero(out);
  RunningRows<kRowBlocks> running;
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    running.top[m][0] = running.top[m][1] = kHidden;
    running.sum[m][0] = running.sum[m][1] = 0;
  }
  int stage = 0;
  for (int64_t first = keys.begin; first < keys.end; first += kKeys, stage ^= 1) {
    WaitForCopies<0>();
    __syncthreads();  // The tile is there for all, and all are done with the one before it.
    if (first + kKeys < keys.end) copy_keys(first + kKeys, stage ^ 1);
    const int offset = stage * Tiles::kKeyBytes;
    float scores[kRowBlocks][kKeys / 8][4];
    MultiplyRows(q, BlockReader<kDim>{k.base + offset}, scores);
    if (!mask.SeesAll(first, kKeys)) SetUnseen(mask, warp_row, first, kHidden, scores);
    Softmax(factor, scores, running, out);
    uint32_t weights[kRowBlocks][kKeys / 16][4];
    PackLeft(scores, weights);
    MultiplyColumns(weights, BlockReader<kDim>{v.base + offset}, out);
  }
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    StoreBlock(args.results, args.head_dim, first_row + warp_row + m * 16,
               first_row + mask.num_rows, head, running.top[m], running.sum[m], out[m]);
  }
}

// Writes, of one query's output, the numbers that a lane owns. `before` is the lse that o holds.
template <typename T>
__device__ RowWeights PlainRow(const ForwardArgs<T>& args, int64_t row, Span keys, int head,
                               int slot, float before, PlainNumbers numbers, float* scores) {
  const int lane = threadIdx.x % 32;
  float out[kPlainPerLane] = {}, top = kHidden, sum = 0;
  for (int64_t first = keys.begin; first < keys.end; first += 32) {
    if (first + lane < keys.end) {
      scores[lane] =
          args.scale * PlainDot(args.q.At(row, head), args.k.At(first + lane, slot), args.head_dim);
    }
    __syncwarp();
    const int count = keys.end - first < 32 ? static_cast<int>(keys.end - first) : 32;
    const float old_top = top;
    for (int i = 0; i < count; ++i) top = fmaxf(top, scores[i]);
    const float shift = top == kHidden ? 0.0f : top, shrink = expf(old_top - shift);
    sum *= shrink;
    for (float& number : out) number *= shrink;
    for (int i = 0; i < count; ++i) {
      const float weight = expf(scores[i] - shift);
      sum += weight;
      numbers.AddTo(out, weight, args.v.At(first + i, slot));
    }
    __syncwarp();
  }
  if (sum == 0 && args.results.merge) return {before, 1, 0};
  RowWeights weights = {kHidden, 0, 0};
  if (sum != 0) weights = JoinRun(top, sum, before);
  for (int i = 0; i < kPlainPerLane && numbers.Has(i); ++i) {
    const int64_t offset = args.results.Offset(row, head) + numbers.At(i);
    float number = out[i] * weights.fresh;
    if (args.results.merge && weights.kept != 0) {
      number += weights.kept * static_cast<float*>(args.results.o)[offset];
    }
    args.results.Store(offset, number);
  }
  return weights;
}

// One query of one head per warp, any storage, strides and head size: a lane scores one key of 32
// at a time and owns every 32nd number of the output, 256 of them in one pass over the keys.
// Grid: [tiles of 128 queries, heads]; 4 warps. Correct first: 4 bytes from L1 per FLOP.
template <typename T>
__global__ void __launch_bounds__(kPlainThreads)
    attention_fwd_plain(const __grid_constant__ ForwardArgs<T> args) {
  UPIPE_SHARED(scores, float[kPlainWarps][32]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = args.heads.first_head + blockIdx.y, slot = args.heads.kv_slot[blockIdx.y];
  const int64_t first_row = args.rows.first_row + int64_t{blockIdx.x} * kAttentionTileRows;
  for (int64_t row = first_row + warp;
       row < first_row + kAttentionTileRows && row < args.rows.end_row; row += kPlainWarps) {
    const Span keys = ColumnsSeen(args.rows, row);
    if (keys.begin == keys.end && args.results.merge) continue;
    float* lse = args.results.lse.At(row, head);
    const float before = args.results.merge ? *lse : kHidden;
    RowWeights weights = {};
    for (int first = 0; first < args.head_dim; first += kPlainNumbers) {
      weights = PlainRow(args, row, keys, head, slot, before, {first + lane, args.head_dim},
                         scores[warp]);
    }
    __syncwarp();
    if (lane == 0) *lse = weights.lse;
  }
}

template <typename T>
ForwardArgs<T> ArgsOf(const AttentionFwdParams& p) {
  return {.q = RowsOf<const T>(p.q),
          .k = RowsOf<const T>(p.k),
          .v = RowsOf<const T>(p.v),
          .results = {.o = p.o.data,
                      .o_row_stride = p.o.stride[0],
                      .o_head_stride = p.o.stride[1],
                      .lse = {static_cast<float*>(p.lse.data), 1, p.lse.stride[0]},
                      .wide = p.o.dtype == DType::kFloat32,
                      .merge = p.merge},
          .head_dim = static_cast<int32_t>(p.q.shape[2]),
          .scale = p.scale};
}

// `launch` starts the kernel for every part of the call.
template <typename T>
void ForEachPart(const AttentionFwdParams& p,
                 const std::function<void(const ForwardArgs<T>&)>& launch) {
  ForwardArgs<T> args = ArgsOf<T>(p);
  ForEachHeadLaunch(p.kv_slot, [&](const LaunchHeads& heads) {
    args.heads = heads;
    ForEachQueryLaunch(p.mask, p.queries, p.keys, [&](const LaunchRows& rows) {
      args.rows = rows;
      launch(args);
    });
  });
}

template <int kDim>
void RunTiled(const AttentionFwdParams& p, const LaunchContext& context) {
  using Tiles = ForwardTiles<kDim>;
  ForEachPart<__nv_bfloat16>(p, [&](const ForwardArgs<__nv_bfloat16>& args) {
    Launch(attention_fwd_tiled<kDim>, GridOf(args.rows, args.heads.num_heads), Tiles::kThreads,
           Tiles::kSharedBytes, context.stream, args);
  });
}

template <typename T>
void RunPlain(const AttentionFwdParams& p, const LaunchContext& context) {
  ForEachPart<T>(p, [&](const ForwardArgs<T>& args) {
    Launch(attention_fwd_plain<T>, GridOf(args.rows, args.heads.num_heads), kPlainThreads, 0,
           context.stream, args);
  });
}

}  // namespace

void Run(const AttentionFwdParams& p, Workspace, const LaunchContext& context) {
  const int64_t head_dim = p.q.shape[2];
  if (p.q.dtype == DType::kFloat32) return RunPlain<float>(p, context);
  if (!IsTiled(p.q) || !IsTiled(p.k) || !IsTiled(p.v) || !IsPaired(p.o) || head_dim > 256) {
    return RunPlain<__nv_bfloat16>(p, context);
  }
  if (head_dim <= 64) return RunTiled<64>(p, context);
  if (head_dim <= 128) return RunTiled<128>(p, context);
  RunTiled<256>(p, context);
}

}  // namespace upipe::kernels::cuda
