// Attention backward, the own kernels: one over query tiles makes dq, one over key tiles makes dk
// and dv. Both recompute the probabilities from lse, so that every gradient is summed by one thread
// in a fixed order: no atomics, no scratch, for 7 products where one pass with atomics takes 5.
// Tiles on tensor cores for bf16 whose rows can be copied 16 bytes at a time, plain kernels for
// everything else.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <functional>

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
struct BackwardInputs {
  Rows<const T> q, k, v, dout;
  Rows<const float> lse, delta;  // rows are queries
  int32_t head_dim;
  float scale;
};

template <typename T>
struct QueryGradientArgs {
  BackwardInputs<T> inputs;
  Rows<float> dq;
  bool accumulate;
  LaunchHeads heads;
  LaunchRows rows;  // queries
};
template <typename T>
struct KeyGradientArgs {
  BackwardInputs<T> inputs;
  Rows<float> dk, dv;
  LaunchSlots slots;
  LaunchRows rows;  // keys
};
static_assert(sizeof(KeyGradientArgs<float>) <= 4096 && sizeof(QueryGradientArgs<float>) <= 4096,
              "kernel parameters of every GPU");

// Shape of the tiled kernel over queries for head sizes up to kDim.
template <int kDim>
struct QueryTiles {
  static constexpr int kRowBlocks = kDim <= 128 ? 2 : 1;  // of 16 queries, per warp
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kThreads = kAttentionTileRows / kWarpRows * 32;
  static constexpr int kBlocksPerMultiprocessor = kDim <= 64 ? 3 : kDim <= 128 ? 2 : 1;
  static constexpr int kKeys = 32;
  static constexpr int kQueryBytes = kTileBytes<kAttentionTileRows, kDim>;
  static constexpr int kKeyBytes = kTileBytes<kKeys, kDim>;
  // q, dout, two stages of k and of v, the mask.
  static constexpr int kSharedBytes =
      2 * kQueryBytes + 4 * kKeyBytes + static_cast<int>(sizeof(TileMask));
};

// Shape of the tiled kernel over keys. Half the warps make dv and half dk. A block makes kOut
// numbers of each, what registers hold; the grid's last dimension goes over the rest.
template <int kDim>
struct KeyTiles {
  static constexpr int kRowBlocks = 2;  // of 16 keys, per warp
  static constexpr int kWarpRows = 16 * kRowBlocks;
  static constexpr int kWarps = kAttentionTileRows / kWarpRows;  // of either half
  static constexpr int kThreads = 2 * kWarps * 32;
  static constexpr int kBlocksPerMultiprocessor = kDim <= 64 ? 2 : 1;
  static constexpr int kQueries = kDim == 128 ? 64 : 32;
  static constexpr int kOut = kDim <= 128 ? kDim : 128;
  static constexpr int kKeyBytes = kTileBytes<kAttentionTileRows, kDim>;
  static constexpr int kQueryBytes = kTileBytes<kQueries, kDim>;
  static constexpr int kStatBytes = kQueries * static_cast<int>(sizeof(float));
  static constexpr int kStatsAt = 2 * kKeyBytes + 4 * kQueryBytes;
  static constexpr int kProbabilitiesAt = kStatsAt + 4 * kStatBytes;
  static constexpr int kMaskAt = kProbabilitiesAt + kAttentionTileRows * kStatBytes;
  // k, v, two stages of q, dout, lse and delta, the probabilities, the mask.
  static constexpr int kSharedBytes = kMaskAt + static_cast<int>(sizeof(TileMask));
};

// Adds (or writes) 16 rows of one block of a warp, times scale. `rows` are those that see some
// column; the others are zero, or as they were when accumulating.
template <int kOut>
__device__ __forceinline__ void StoreGradient(const Rows<float>& to, int64_t head,
                                              int64_t first_row, Span rows, int64_t end_row,
                                              int first_number, int head_dim, float scale,
                                              bool accumulate, const float (&sums)[kOut][4]) {
  const int lane = threadIdx.x % 32;
  UPIPE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + half * 8 + lane / 4;
    const bool seeing = row >= rows.begin && row < rows.end;
    if (row >= end_row || (accumulate && !seeing)) continue;
    float* numbers = to.At(row, head) + first_number + lane % 4 * 2;
    UPIPE_UNROLL
    for (int n = 0; n < kOut; ++n) {
      if (first_number + n * 8 >= head_dim) break;
      auto* out = reinterpret_cast<float2*>(numbers + n * 8);
      float2 pair = accumulate ? *out : float2{0, 0};
      if (seeing) {
        pair.x += scale * sums[n][2 * half];
        pair.y += scale * sums[n][2 * half + 1];
      }
      *out = pair;
    }
  }
}

// Score gradients but for the scale: scores s and products dp of dout and v become p * (dp -
// delta), p = 2^(s * factor - lse).
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void QueryGradients(float factor, const float (&lse)[kRowBlocks][2],
                                               const float (&delta)[kRowBlocks][2],
                                               const float (&dp)[kRowBlocks][kColumns][4],
                                               float (&s)[kRowBlocks][kColumns][4]) {
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      UPIPE_UNROLL
      for (int e = 0; e < 4; ++e) {
        const float p = Exp2(s[m][n][e] * factor - lse[m][e / 2]);
        s[m][n][e] = p * (dp[m][n][e] - delta[m][e / 2]);
      }
    }
  }
}

// dq of one tile of 128 queries of one head, 4 warps of 32 rows (8 of 16 above head size 128); keys
// pass by in tiles of 32, k and v double-buffered by cp.async, one barrier per tile. Scores, their
// gradients and dq stay in registers.
// Grid: [tiles, heads]; the last tiles, which see most under a causal mask, start first.
// Shared bytes: 512 kDim (q, dout) + 256 kDim (k, v) + 2 KiB (mask): 98 KiB at 128, two blocks per
// multiprocessor. Per visible pair 6 head_dim FLOPs; from memory at least 4 head_dim (3 queries +
// visible keys) bytes, from L2 4 head_dim bytes per key and tile: 192 FLOPs a byte. Left operands
// are read for 32 keys, right ones for 32 rows: 1.7 clocks of shared memory a product.
template <int kDim>
__global__ void __launch_bounds__(QueryTiles<kDim>::kThreads,
                                  QueryTiles<kDim>::kBlocksPerMultiprocessor)
    attention_bwd_dq_tiled(const __grid_constant__ QueryGradientArgs<__nv_bfloat16> args) {
  using Tiles = QueryTiles<kDim>;
  constexpr int kRowBlocks = Tiles::kRowBlocks, kKeys = Tiles::kKeys;
  char* const shared = DynamicShared<char>();
  auto& mask = *reinterpret_cast<TileMask*>(shared + 2 * Tiles::kQueryBytes + 4 * Tiles::kKeyBytes);
  const SharedAddress q_tile = AddressInShared(shared), dout_tile = q_tile + Tiles::kQueryBytes,
                      k_tiles = dout_tile + Tiles::kQueryBytes,
                      v_tiles = k_tiles + 2 * Tiles::kKeyBytes;
  const BackwardInputs<__nv_bfloat16>& in = args.inputs;
  const int head = args.heads.first_head + blockIdx.y, slot = args.heads.kv_slot[blockIdx.y];
  const int64_t first_row =
      args.rows.first_row + int64_t{gridDim.x - 1 - blockIdx.x} * kAttentionTileRows;
  mask.Fill(args.rows, first_row);
  const Span keys = mask.Columns();
  Span rows = {first_row, first_row};  // that see some key
  if (keys.begin < keys.end) {
    const Span seeing = mask.SeeingRows(args.rows.num_columns);
    rows = {first_row + seeing.begin, first_row + seeing.end};
  }

  const auto copy_keys = [&](int64_t first, int stage) {
    CopyTile<kKeys, kDim, Tiles::kThreads>(in.k, slot, first, keys, in.head_dim,
                                           k_tiles + stage * Tiles::kKeyBytes);
    CopyTile<kKeys, kDim, Tiles::kThreads>(in.v, slot, first, keys, in.head_dim,
                                           v_tiles + stage * Tiles::kKeyBytes);
    CommitCopies();
  };
  if (keys.begin < keys.end) {
    CopyTile<kAttentionTileRows, kDim, Tiles::kThreads>(in.q, head, first_row, rows, in.head_dim,
                                                        q_tile);
    CopyTile<kAttentionTileRows, kDim, Tiles::kThreads>(in.dout, head, first_row, rows, in.head_dim,
                                                        dout_tile);
    copy_keys(keys.begin, 0);
  }
  const int lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tiles::kWarpRows;
  float lse[kRowBlocks][2], delta[kRowBlocks][2];
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + warp_row + m * 16 + half * 8 + lane / 4;
      const bool seeing = row >= rows.begin && row < rows.end;
      lse[m][half] = seeing ? *in.lse.At(row, head) * kLog2E : 0.0f;
      delta[m][half] = seeing ? *in.delta.At(row, head) : 0.0f;
    }
  }

  const auto q = LeftBlocks<kDim>(q_tile + warp_row * kDim * kBf16Bytes);
  const auto dout = LeftBlocks<kDim>(dout_tile + warp_row * kDim * kBf16Bytes);
  const auto k = RightBlocks<kDim>(k_tiles), v = RightBlocks<kDim>(v_tiles);
  const auto k_columns = LeftBlocks<kDim>(k_tiles);
  float dq[kRowBlocks][kDim / 8][4];
  SetZero(dq);
  int stage = 0;
  for (int64_t first = keys.begin; first < keys.end; first += kKeys, stage ^= 1) {
    WaitForCopies<0>();
    __syncthreads();  // The tile is there for all, and all are done with the one before it.
    if (first + kKeys < keys.end) copy_keys(first + kKeys, stage ^ 1);
    const int offset = stage * Tiles::kKeyBytes;
    float scores[kRowBlocks][kKeys / 8][4], dp[kRowBlocks][kKeys / 8][4];
    MultiplyRows(q, BlockReader<kDim>{k.base + offset}, scores);
    MultiplyRows(dout, BlockReader<kDim>{v.base + offset}, dp);
    QueryGradients(in.scale * kLog2E, lse, delta, dp, scores);
    if (!mask.SeesAll(first, kKeys)) SetUnseen(mask, warp_row, first, 0.0f, scores);
    uint32_t gradients[kRowBlocks][kKeys / 16][4];
    PackLeft(scores, gradients);
    MultiplyColumns(gradients, BlockReader<kDim>{k_columns.base + offset}, dq);
  }
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    StoreGradient(args.dq, head, first_row + warp_row + m * 16, rows, first_row + mask.num_rows, 0,
                  in.head_dim, in.scale, args.accumulate, dq[m]);
  }
}

// Scores s^T of keys (rows) and queries become probabilities.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void MakeProbabilities(float factor, const float* lse,
                                                  float (&s)[kRowBlocks][kColumns][4]) {
  UPIPE_UNROLL
  for (int n = 0; n < kColumns; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(lse + n * 8 + threadIdx.x % 4 * 2);
    const float lses[2] = {kLog2E * pair.x, kLog2E * pair.y};
    UPIPE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      UPIPE_UNROLL
      for (int e = 0; e < 4; ++e) s[m][n][e] = Exp2(s[m][n][e] * factor - lses[e % 2]);
    }
  }
}

// Hands the probabilities to the warp that makes dk of the same keys: to the lane that holds the
// same numbers.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void HandOver(const float (&p)[kRowBlocks][kColumns][4],
                                         float4* handed) {
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      handed[(m * kColumns + n) * 32 + threadIdx.x % 32] = {p[m][n][0], p[m][n][1], p[m][n][2],
                                                            p[m][n][3]};
    }
  }
}

// Products dp^T of v and dout become score gradients but for the scale, with the probabilities that
// were handed over.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void MakeScoreGradients(const float* delta, const float4* handed,
                                                   float (&dp)[kRowBlocks][kColumns][4]) {
  const int lane = threadIdx.x % 32;
  UPIPE_UNROLL
  for (int n = 0; n < kColumns; ++n) {
    const float2 deltas = *reinterpret_cast<const float2*>(delta + n * 8 + lane % 4 * 2);
    UPIPE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) {
      const float4 p = handed[(m * kColumns + n) * 32 + lane];
      dp[m][n][0] = p.x * (dp[m][n][0] - deltas.x);
      dp[m][n][1] = p.y * (dp[m][n][1] - deltas.y);
      dp[m][n][2] = p.z * (dp[m][n][2] - deltas.x);
      dp[m][n][3] = p.w * (dp[m][n][3] - deltas.y);
    }
  }
}

// dk and dv of one tile of 128 keys of one gradient slot, over its query heads in ascending order.
// 4 warps of 32 keys make dv and 4 make dk; queries pass by in tiles of 64 (32 where kDim is
// not 128), q, dout, lse and delta double-buffered by cp.async, one barrier per tile. Products are
// made transposed, keys in rows, so that they are left operands as they come out of registers: a
// warp makes s^T = k q^T and then dv += p^T dout, its partner meanwhile dp^T = v dout^T and, given
// p through shared memory, dk += ds^T q. Rows being 32, shared memory keeps up with the tensor
// cores. Grid: [tiles, slots, parts of kOut numbers]; the first tiles are seen by most under a
// causal mask and start first. Shared bytes: 512 kDim (k, v) + 8 kDim queries + 528 queries + 2
// KiB: 163 KiB at 128. Per visible pair 8 head_dim FLOPs; from L2 4 head_dim bytes per query and
// tile: 256 FLOPs a byte; 1.5 clocks of shared memory a product at 128.
template <int kDim>
__global__ void __launch_bounds__(KeyTiles<kDim>::kThreads,
                                  KeyTiles<kDim>::kBlocksPerMultiprocessor)
    attention_bwd_dkdv_tiled(const __grid_constant__ KeyGradientArgs<__nv_bfloat16> args) {
  using Tiles = KeyTiles<kDim>;
  constexpr int kRowBlocks = Tiles::kRowBlocks, kQueries = Tiles::kQueries, kOut = Tiles::kOut;
  char* const shared = DynamicShared<char>();
  auto& mask = *reinterpret_cast<TileMask*>(shared + Tiles::kMaskAt);
  const SharedAddress k_tile = AddressInShared(shared), v_tile = k_tile + Tiles::kKeyBytes,
                      q_tiles = v_tile + Tiles::kKeyBytes,
                      dout_tiles = q_tiles + 2 * Tiles::kQueryBytes,
                      stat_tiles = k_tile + Tiles::kStatsAt;  // lse, lse, delta, delta
  const BackwardInputs<__nv_bfloat16>& in = args.inputs;
  const int first_head = args.slots.begin[blockIdx.y], end_head = args.slots.begin[blockIdx.y + 1];
  const int kv_slot = args.slots.kv_slot[blockIdx.y], grad_slot = args.slots.grad_slot[blockIdx.y];
  const int64_t first_row = args.rows.first_row + int64_t{blockIdx.x} * kAttentionTileRows;
  mask.Fill(args.rows, first_row);
  const Span queries = mask.Columns();
  if (queries.begin == queries.end) return;
  // Looked up again at the end: registers are full in between.
  const auto seeing_rows = [&] {
    const Span seeing = mask.SeeingRows(args.rows.num_columns);
    return Span{first_row + seeing.begin, first_row + seeing.end};
  };

  const auto copy_queries = [&](int head, int64_t first, int stage) {
    CopyTile<kQueries, kDim, Tiles::kThreads>(in.q, head, first, queries, in.head_dim,
                                              q_tiles + stage * Tiles::kQueryBytes);
    CopyTile<kQueries, kDim, Tiles::kThreads>(in.dout, head, first, queries, in.head_dim,
                                              dout_tiles + stage * Tiles::kQueryBytes);
    if (threadIdx.x < 2 * kQueries) {
      const int i = threadIdx.x % kQueries, which = threadIdx.x / kQueries;
      const bool present = first + i < queries.end;
      const Rows<const float>& from = which == 0 ? in.lse : in.delta;
      CopyAsync4(from.At(present ? first + i : first, head), present,
                 stat_tiles + (2 * which + stage) * Tiles::kStatBytes + i * 4);
    }
    CommitCopies();
  };
  const Span k_rows = seeing_rows();
  CopyTile<kAttentionTileRows, kDim, Tiles::kThreads>(in.k, kv_slot, first_row, k_rows, in.head_dim,
                                                      k_tile);
  CopyTile<kAttentionTileRows, kDim, Tiles::kThreads>(in.v, kv_slot, first_row, k_rows, in.head_dim,
                                                      v_tile);
  copy_queries(args.slots.head[first_head], queries.begin, 0);

  const int warp = static_cast<int>(threadIdx.x) / 32 % Tiles::kWarps;
  const bool makes_dv = threadIdx.x < Tiles::kThreads / 2;
  const int warp_row = warp * Tiles::kWarpRows, first_number = blockIdx.z * kOut;
  const auto left = LeftBlocks<kDim>((makes_dv ? k_tile : v_tile) + warp_row * kDim * kBf16Bytes);
  const auto right = RightBlocks<kDim>(makes_dv ? q_tiles : dout_tiles);
  const auto columns =
      LeftBlocks<kDim>((makes_dv ? dout_tiles : q_tiles) + first_number * kBf16Bytes);
  auto* const handed =
      reinterpret_cast<float4*>(shared + Tiles::kProbabilitiesAt + warp_row * Tiles::kStatBytes);
  const float* const stats =
      reinterpret_cast<const float*>(shared + Tiles::kStatsAt) + (makes_dv ? 0 : 2 * kQueries);
  float sums[kRowBlocks][kOut / 8][4];
  SetZero(sums);
  const auto advance = [&](int& i, int64_t& first) {
    first += kQueries;
    if (first < queries.end) return;
    first = queries.begin;
    ++i;
  };
  int i = first_head, stage = 0;  // of the heads of the slot
  int64_t first = queries.begin;
  while (i < end_head) {
    WaitForCopies<0>();
    __syncthreads();  // The tile is there for all, and all are done with the one before it.
    int next_i = i;
    int64_t next = first;
    advance(next_i, next);
    if (next_i < end_head) copy_queries(args.slots.head[next_i], next, stage ^ 1);
    const int offset = stage * Tiles::kQueryBytes;
    float products[kRowBlocks][kQueries / 8][4];
    MultiplyRows(left, BlockReader<kDim>{right.base + offset}, products);
    if (makes_dv) {
      MakeProbabilities(in.scale * kLog2E, stats + stage * kQueries, products);
      if (!mask.SeesAll(first, kQueries)) SetUnseen(mask, warp_row, first, 0.0f, products);
      HandOver(products, handed);
      SyncThreads(1 + warp, 64);
    } else {
      SyncThreads(1 + warp, 64);
      MakeScoreGradients(stats + stage * kQueries, handed, products);
    }
    uint32_t factors[kRowBlocks][kQueries / 16][4];
    PackLeft(products, factors);
    MultiplyColumns(factors, BlockReader<kDim>{columns.base + offset}, sums);
    advance(i, first);
    stage ^= 1;
  }
  const Span rows = seeing_rows();
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    StoreGradient(makes_dv ? args.dv : args.dk, grad_slot, first_row + warp_row + m * 16, rows,
                  first_row + mask.num_rows, first_number, in.head_dim, makes_dv ? 1.0f : in.scale,
                  true, sums[m]);
  }
}

// Probability and score gradient of one query and key.
struct PlainGradient {
  float p;
  float ds;
};
template <typename T>
__device__ PlainGradient GradientOf(const BackwardInputs<T>& in, int64_t query, int head,
                                    int64_t key, int slot) {
  const float score = PlainDot(in.q.At(query, head), in.k.At(key, slot), in.head_dim);
  const float dp = PlainDot(in.dout.At(query, head), in.v.At(key, slot), in.head_dim);
  const float p = expf(in.scale * score - *in.lse.At(query, head));
  return {p, in.scale * p * (dp - *in.delta.At(query, head))};
}

// dq of one query of one head per warp, any storage, strides and head size: a lane makes the score
// gradient of one key of 32 at a time and owns every 32nd number of dq, 256 of them in one pass
// over the keys. Grid: [tiles of 128 queries, heads]; 4 warps.
template <typename T>
__global__ void __launch_bounds__(kPlainThreads)
    attention_bwd_dq_plain(const __grid_constant__ QueryGradientArgs<T> args) {
  UPIPE_SHARED(gradients, float[kPlainWarps][32]);
  const BackwardInputs<T>& in = args.inputs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head = args.heads.first_head + blockIdx.y, slot = args.heads.kv_slot[blockIdx.y];
  const int64_t first_row = args.rows.first_row + int64_t{blockIdx.x} * kAttentionTileRows;
  for (int64_t row = first_row + warp;
       row < first_row + kAttentionTileRows && row < args.rows.end_row; row += kPlainWarps) {
    const Span keys = ColumnsSeen(args.rows, row);
    if (keys.begin == keys.end && args.accumulate) continue;
    for (int number = 0; number < in.head_dim; number += kPlainNumbers) {
      const PlainNumbers numbers = {number + lane, in.head_dim};
      float dq[kPlainPerLane] = {};
      for (int64_t first = keys.begin; first < keys.end; first += 32) {
        const int count = keys.end - first < 32 ? static_cast<int>(keys.end - first) : 32;
        if (lane < count) gradients[warp][lane] = GradientOf(in, row, head, first + lane, slot).ds;
        __syncwarp();
        for (int i = 0; i < count; ++i) {
          numbers.AddTo(dq, gradients[warp][i], in.k.At(first + i, slot));
        }
        __syncwarp();
      }
      float* out = args.dq.At(row, head);
      for (int i = 0; i < kPlainPerLane && numbers.Has(i); ++i) {
        out[numbers.At(i)] = (args.accumulate ? out[numbers.At(i)] : 0.0f) + dq[i];
      }
    }
  }
}

// dk and dv of one key of one gradient slot per warp, as attention_bwd_dq_plain; the slot's heads
// in ascending order. Grid: [tiles of 128 keys, slots]; 4 warps.
template <typename T>
__global__ void __launch_bounds__(kPlainThreads)
    attention_bwd_dkdv_plain(const __grid_constant__ KeyGradientArgs<T> args) {
  UPIPE_SHARED(gradients, PlainGradient[kPlainWarps][32]);
  const BackwardInputs<T>& in = args.inputs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int kv_slot = args.slots.kv_slot[blockIdx.y], grad_slot = args.slots.grad_slot[blockIdx.y];
  const int64_t first_row = args.rows.first_row + int64_t{blockIdx.x} * kAttentionTileRows;
  for (int64_t row = first_row + warp;
       row < first_row + kAttentionTileRows && row < args.rows.end_row; row += kPlainWarps) {
    const Span queries = ColumnsSeen(args.rows, row);
    if (queries.begin == queries.end) continue;
    for (int number = 0; number < in.head_dim; number += kPlainNumbers) {
      const PlainNumbers numbers = {number + lane, in.head_dim};
      float dk[kPlainPerLane] = {}, dv[kPlainPerLane] = {};
      for (int h = args.slots.begin[blockIdx.y]; h < args.slots.begin[blockIdx.y + 1]; ++h) {
        const int head = args.slots.head[h];
        for (int64_t first = queries.begin; first < queries.end; first += 32) {
          const int count = queries.end - first < 32 ? static_cast<int>(queries.end - first) : 32;
          if (lane < count)
            gradients[warp][lane] = GradientOf(in, first + lane, head, row, kv_slot);
          __syncwarp();
          for (int i = 0; i < count; ++i) {
            numbers.AddTo(dk, gradients[warp][i].ds, in.q.At(first + i, head));
            numbers.AddTo(dv, gradients[warp][i].p, in.dout.At(first + i, head));
          }
          __syncwarp();
        }
      }
      float *dk_out = args.dk.At(row, grad_slot), *dv_out = args.dv.At(row, grad_slot);
      for (int i = 0; i < kPlainPerLane && numbers.Has(i); ++i) {
        dk_out[numbers.At(i)] += dk[i];
        dv_out[numbers.At(i)] += dv[i];
      }
    }
  }
}

template <typename T>
BackwardInputs<T> InputsOf(const AttentionBwdParams& p) {
  return {.q = RowsOf<const T>(p.q),
          .k = RowsOf<const T>(p.k),
          .v = RowsOf<const T>(p.v),
          .dout = RowsOf<const T>(p.dout),
          .lse = {static_cast<const float*>(p.lse.data), 1, p.lse.stride[0]},
          .delta = {static_cast<const float*>(p.delta.data), p.delta.stride[0], 1},
          .head_dim = static_cast<int32_t>(p.q.shape[2]),
          .scale = p.scale};
}

// The kernels of one call, started for every part of it.
template <typename T>
void ForEachPart(const AttentionBwdParams& p,
                 const std::function<void(const QueryGradientArgs<T>&)>& launch_queries,
                 const std::function<void(const KeyGradientArgs<T>&)>& launch_keys) {
  QueryGradientArgs<T> over_queries = {InputsOf<T>(p), RowsOf<float>(p.dq), p.accumulate_dq};
  ForEachHeadLaunch(p.kv_slot, [&](const LaunchHeads& heads) {
    over_queries.heads = heads;
    ForEachQueryLaunch(p.mask, p.queries, p.keys, [&](const LaunchRows& rows) {
      over_queries.rows = rows;
      launch_queries(over_queries);
    });
  });
  KeyGradientArgs<T> over_keys = {InputsOf<T>(p), RowsOf<float>(p.dk), RowsOf<float>(p.dv)};
  ForEachSlotLaunch(p.kv_slot, p.grad_slot, [&](const LaunchSlots& slots) {
    over_keys.slots = slots;
    ForEachKeyLaunch(p.mask, p.keys, p.queries, [&](const LaunchRows& rows) {
      over_keys.rows = rows;
      launch_keys(over_keys);
    });
  });
}

template <int kDim>
void RunTiled(const AttentionBwdParams& p, const LaunchContext& context) {
  using Number = __nv_bfloat16;
  ForEachPart<Number>(
      p,
      [&](const QueryGradientArgs<Number>& args) {
        Launch(attention_bwd_dq_tiled<kDim>, GridOf(args.rows, args.heads.num_heads),
               QueryTiles<kDim>::kThreads, QueryTiles<kDim>::kSharedBytes, context.stream, args);
      },
      [&](const KeyGradientArgs<Number>& args) {
        dim3 grid = GridOf(args.rows, args.slots.num_slots);
        grid.z = kDim / KeyTiles<kDim>::kOut;
        Launch(attention_bwd_dkdv_tiled<kDim>, grid, KeyTiles<kDim>::kThreads,
               KeyTiles<kDim>::kSharedBytes, context.stream, args);
      });
}

template <typename T>
void RunPlain(const AttentionBwdParams& p, const LaunchContext& context) {
  ForEachPart<T>(
      p,
      [&](const QueryGradientArgs<T>& args) {
        Launch(attention_bwd_dq_plain<T>, GridOf(args.rows, args.heads.num_heads), kPlainThreads, 0,
               context.stream, args);
      },
      [&](const KeyGradientArgs<T>& args) {
        Launch(attention_bwd_dkdv_plain<T>, GridOf(args.rows, args.slots.num_slots), kPlainThreads,
               0, context.stream, args);
      });
}

}  // namespace

void Run(const AttentionBwdParams& p, Workspace, const LaunchContext& context) {
  const int64_t head_dim = p.q.shape[2];
  if (p.q.dtype == DType::kFloat32) return RunPlain<float>(p, context);
  bool tiled = head_dim <= 256;
  for (const TensorView* view : {&p.q, &p.k, &p.v, &p.dout}) tiled = tiled && IsTiled(*view);
  for (const TensorView* view : {&p.dq, &p.dk, &p.dv}) tiled = tiled && IsPaired(*view);
  if (!tiled) return RunPlain<__nv_bfloat16>(p, context);
  if (head_dim <= 64) return RunTiled<64>(p, context);
  if (head_dim <= 128) return RunTiled<128>(p, context);
  RunTiled<256>(p, context);
}

}  // namespace upipe::kernels::cuda
