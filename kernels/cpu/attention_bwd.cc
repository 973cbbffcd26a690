// Attention backward from the saved log-sum-exp, one pass of five products per pair of tiles. A key
// tile (K and V transposed, dK and dV accumulating) stays in cache while the queries that see it
// stream past; dQ accumulates in place. Threads take disjoint (key chunk, query chunk) pairs in
// rounds: round r pairs key chunk j with query chunk (j + r) mod chunks, so no two write the same
// rows, and every sum has one order.
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/attention_mask.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/isa.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_bwd.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/attention_rows-inl.h"
#include "kernels/cpu/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kTileFloats = 16384;
constexpr int64_t kCopyFloats = 18432;  // of copied rows: tile and padding
constexpr int64_t kMaxKeyTile = 128;
constexpr int64_t kMaxQueryTile = 64;
constexpr int64_t kScoreStride = RowStride(kMaxKeyTile);
static_assert(kPanel * kMaxHeadDim <= kTileFloats);
static_assert(kTileFloats + kMaxKeyTile * RowStride(0) <= kCopyFloats);

// One key tile of one slot; `width` is head_dim rounded up to whole vectors.
struct BackwardTile {
  int64_t head_dim, width, key_tile, query_tile;
  alignas(64) float keys_t[kTileFloats];    // [panels, head_dim, kPanel]
  alignas(64) float values_t[kTileFloats];  // [panels, head_dim, kPanel]
  alignas(64) float dk[kTileFloats];        // [key_tile, width]
  alignas(64) float dv[kTileFloats];        // [key_tile, width]
  // [query_tile, kScoreStride]: scores, then probabilities; dP, then dS.
  alignas(64) float scores[kMaxQueryTile * kScoreStride];
  alignas(64) float gradients[kMaxQueryTile * kScoreStride];
  // Copies; dq only when width > head_dim.
  alignas(64) float keys[kCopyFloats];
  alignas(64) float queries[kCopyFloats];
  alignas(64) float douts[kCopyFloats];
  alignas(64) float dq[kTileFloats];
};

void SetSizes(int64_t head_dim, BackwardTile& tile) {
  tile.head_dim = head_dim;
  tile.width = (head_dim + kLanes - 1) / kLanes * kLanes;
  tile.key_tile = std::min(kMaxKeyTile, kTileFloats / tile.width / kPanel * kPanel);
  tile.query_tile = std::min(kMaxQueryTile, kTileFloats / tile.width);
}

void Transpose(const TensorView& view, int64_t first, int32_t slot, int64_t count,
               const BackwardTile& tile, float* panels) {
  std::fill_n(panels, tile.key_tile * tile.head_dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    alignas(64) float row[kMaxHeadDim];
    LoadRow(view, first + i, slot, row);
    float* column = panels + i / kPanel * tile.head_dim * kPanel + i % kPanel;
    for (int64_t e = 0; e < tile.head_dim; ++e) column[e * kPanel] = row[e];
  }
}

// Columns [begin, end) of one row: score -> probability, dP -> dS = scale * P * (dP - delta).
template <bool kMasked>
HWY_INLINE void GradientRow(float* score, float* gradient, int64_t begin, int64_t end,
                            PositionRun seen, float base2_scale, float base2_lse, float delta,
                            float scale) {
  const F32 d;
  const VecF32 multiplier = hn::Set(d, base2_scale), lse = hn::Set(d, base2_lse);
  const VecF32 offset = hn::Set(d, delta), factor = hn::Set(d, scale);
  for (int64_t j = begin; j < end; j += kLanes) {
    VecF32 probability = Exp2(hn::MulSub(hn::Load(d, score + j), multiplier, lse));
    VecF32 ds = hn::Mul(hn::Sub(hn::Load(d, gradient + j), offset), hn::Mul(probability, factor));
    if constexpr (kMasked) {
      const auto visible = LanesWithin(j, seen.begin, seen.end);
      probability = hn::IfThenElseZero(visible, probability);
      ds = hn::IfThenElseZero(visible, ds);
    }
    hn::Store(probability, d, score + j);
    hn::Store(ds, d, gradient + j);
  }
}

// scores and gradients of a tile, columns [begin, end): from raw products to P and dS.
void GradientTile(const AttentionBwdParams& p, int64_t head, PositionRun queries, PositionRun keys,
                  int64_t begin, int64_t end, BackwardTile& tile) {
  const bool whole = keys.begin + end <= keys.end &&
                     SeesAll(p.mask, queries, {keys.begin + begin, keys.begin + end});
  for (int64_t query = queries.begin; query < queries.end; ++query) {
    const int64_t row = query - queries.begin, token = query - p.queries.begin;
    float *score = tile.scores + row * kScoreStride,
          *gradient = tile.gradients + row * kScoreStride;
    const float lse = *Ptr(p.lse, head, token) * kLog2E, delta = *Ptr(p.delta, token, head);
    if (whole) {
      GradientRow<false>(score, gradient, begin, end, {}, p.scale * kLog2E, lse, delta, p.scale);
    } else {
      PositionRun seen = Intersection(VisibleKeys(p.mask, query), keys);
      seen = {seen.begin - keys.begin, seen.end - keys.begin};
      GradientRow<true>(score, gradient, begin, end, seen, p.scale * kLog2E, lse, delta, p.scale);
    }
  }
}

void AddQueryGradient(const AttentionBwdParams& p, int64_t head, int64_t first, int64_t count,
                      const Rows& keys, int64_t begin, int64_t depth, BackwardTile& tile) {
  const bool padded = tile.width != tile.head_dim;
  if (padded) std::fill_n(tile.dq, count * tile.width, 0.0f);
  Multiply<ReadA::kByRow, Into::kAdd>({.a = tile.gradients + begin,
                                       .a_stride = kScoreStride,
                                       .b = keys.data + begin * keys.stride,
                                       .b_stride = keys.stride,
                                       .c = padded ? tile.dq : Ptr(p.dq, first, head),
                                       .c_stride = padded ? tile.width : p.dq.stride[0],
                                       .depth = depth},
                                      count, tile.width);
  for (int64_t i = 0; padded && i < count; ++i) {
    float* dq = Ptr(p.dq, first + i, head);
    for (int64_t e = 0; e < tile.head_dim; ++e) dq[e] += tile.dq[i * tile.width + e];
  }
}

// The queries of one tile meet the loaded key tile; `next` will be the queries after them.
void BackwardQueries(const AttentionBwdParams& p, int64_t head, PositionRun queries,
                     PositionRun next, PositionRun keys, const Rows& key_rows, BackwardTile& tile) {
  const int64_t first = queries.begin - p.queries.begin, count = queries.end - queries.begin;
  const PositionRun reach = KeysSeen(p.mask, queries, keys);
  if (reach.begin == reach.end) return;
  const int64_t begin = (reach.begin - keys.begin) / kPanel * kPanel;
  const int64_t end = (reach.end - keys.begin + kPanel - 1) / kPanel * kPanel;
  const Rows q = LoadRows(p.q, first, head, count, tile.width, tile.queries);
  const Rows dout = LoadRows(p.dout, first, head, count, tile.width, tile.douts);
  const int64_t num_next = next.end - next.begin, steps = tile.query_tile / kTileRows;
  ComingRows next_queries(p.q, first + count, head, num_next, steps * ((end - begin) / kPanel));
  ComingRows next_douts(p.dout, first + count, head, num_next, steps * ((end - begin) / kPanel));
  ComingRows dq_rows(p.dq, first, head, count, std::max<int64_t>(1, (end - begin) / kTileRows));
  for (int64_t j = begin; j < end; j += kPanel) {
    TileOperands t = {.a = q.data,
                      .a_stride = q.stride,
                      .b = tile.keys_t + j * tile.head_dim,
                      .b_stride = kPanel,
                      .c = tile.scores + j,
                      .c_stride = kScoreStride,
                      .depth = tile.head_dim,
                      .coming = &next_queries};
    MultiplyPanel<kTileVectors, ReadA::kByRow, Into::kStore>(t, count);
    t.a = dout.data;
    t.a_stride = dout.stride;
    t.b = tile.values_t + j * tile.head_dim;
    t.c = tile.gradients + j;
    t.coming = &next_douts;
    MultiplyPanel<kTileVectors, ReadA::kByRow, Into::kStore>(t, count);
  }
  GradientTile(p, head, queries, keys, begin, end, tile);
  const int64_t num_keys = std::min(end, keys.end - keys.begin) - begin;
  TileOperands t = {.a = tile.scores + begin,
                    .a_stride = kScoreStride,
                    .b = dout.data,
                    .b_stride = dout.stride,
                    .c = tile.dv + begin * tile.width,
                    .c_stride = tile.width,
                    .depth = count,
                    .coming = &dq_rows};
  Multiply<ReadA::kByColumn, Into::kAdd>(t, num_keys, tile.width);
  t.a = tile.gradients + begin;
  t.b = q.data;
  t.b_stride = q.stride;
  t.c = tile.dk + begin * tile.width;
  Multiply<ReadA::kByColumn, Into::kAdd>(t, num_keys, tile.width);
  AddQueryGradient(p, head, first, count, key_rows, begin, num_keys, tile);
}

void AddRows(const float* sums, const BackwardTile& tile, const TensorView& out, int64_t first,
             int32_t slot, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = Ptr(out, first + i, slot);
    for (int64_t e = 0; e < tile.head_dim; ++e) row[e] += sums[i * tile.width + e];
  }
}

// All heads of a K/V head, the queries of one chunk against the keys of one chunk.
void AttentionBackwardChunk(const AttentionBwdParams& p, const KvHeadSlots& slots,
                            PositionRun query_chunk, PositionRun key_chunk) {
  BackwardTile tile;
  SetSizes(p.q.shape[2], tile);
  for (int64_t key = key_chunk.begin; key < key_chunk.end; key += tile.key_tile) {
    const PositionRun keys = {key, std::min(key_chunk.end, key + tile.key_tile)};
    const int64_t first = key - p.keys.begin, count = keys.end - keys.begin;
    const PositionRun queries = QueriesSeeing(p.mask, keys, query_chunk);
    if (queries.begin == queries.end) continue;
    Transpose(p.k, first, slots.kv, count, tile, tile.keys_t);
    Transpose(p.v, first, slots.kv, count, tile, tile.values_t);
    const Rows key_rows = LoadRows(p.k, first, slots.kv, count, tile.width, tile.keys);
    std::fill_n(tile.dk, count * tile.width, 0.0f);
    std::fill_n(tile.dv, count * tile.width, 0.0f);
    for (int64_t head = 0; head < p.q.shape[1]; ++head) {
      if (p.kv_slot[head] != slots.kv) continue;
      for (int64_t query = queries.begin; query < queries.end; query += tile.query_tile) {
        const int64_t end = std::min(queries.end, query + tile.query_tile);
        const PositionRun next = {end, std::min(queries.end, end + tile.query_tile)};
        BackwardQueries(p, head, {query, end}, next, keys, key_rows, tile);
      }
    }
    AddRows(tile.dk, tile, p.dk, first, slots.gradient, count);
    AddRows(tile.dv, tile, p.dv, first, slots.gradient, count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(AttentionBackwardChunk);

namespace {

constexpr int64_t kChunksPerThread = 8;  // evens out causal rounds
constexpr int64_t kMinChunk = 128;       // tokens; smaller ones waste tiles

struct ChunkPair {
  KvHeadSlots slots;
  PositionRun queries;
  PositionRun keys;
};

// Chunk `index` of `count` near-equal ones.
PositionRun Chunk(PositionRun run, int64_t index, int64_t count) {
  const int64_t size = (run.end - run.begin + count - 1) / count;
  return Intersection({run.begin + index * size, run.begin + (index + 1) * size}, run);
}

// Of the K/V heads that some query head reads, by ascending kv slot.
std::vector<KvHeadSlots> UsedSlots(const AttentionBwdParams& p) {
  std::map<int32_t, int32_t> gradient_of;
  for (size_t head = 0; head < p.kv_slot.size(); ++head) {
    gradient_of[p.kv_slot[head]] = p.grad_slot[head];
  }
  std::vector<KvHeadSlots> slots;
  for (const auto& [kv, gradient] : gradient_of) slots.push_back({kv, gradient});
  return slots;
}

// One chunk when slots alone keep the threads busy; else about kChunksPerThread pairs per thread
// and round.
int64_t NumChunks(const AttentionBwdParams& p, int64_t slots, int64_t threads) {
  if (slots % threads == 0) return 1;
  const int64_t wanted = (kChunksPerThread * threads + slots - 1) / slots;
  const int64_t most = std::min(p.q.shape[0], p.k.shape[0]) / kMinChunk;
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, most));
}

void ClearQueryGradients(const AttentionBwdParams& p, ExecContext& context) {
  context.parallel.Run(p.dq.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < p.dq.shape[1]; ++h) std::fill_n(Ptr(p.dq, t, h), p.dq.shape[2], 0.0f);
    }
  });
}

}  // namespace

absl::Status Backend::Run(const AttentionBwdParams& p, Workspace, ExecContext& context) {
  if (absl::Status ok = CheckHeadDim(p.q.shape[2]); !ok.ok()) return ok;
  if (!p.accumulate_dq) ClearQueryGradients(p, context);
  const std::vector<KvHeadSlots> used = UsedSlots(p);
  if (used.empty()) return absl::OkStatus();
  const bool bf16_products = p.q.dtype == DType::kBFloat16 && HasBf16Products();
  const int64_t chunks = NumChunks(p, used.size(), context.parallel.num_threads());
  std::vector<ChunkPair> pairs;
  for (int64_t round = 0; round < chunks; ++round) {
    pairs.clear();
    for (const KvHeadSlots& slots : used) {
      for (int64_t j = 0; j < chunks; ++j) {
        const PositionRun queries = Chunk(p.queries, (j + round) % chunks, chunks);
        const PositionRun keys = KeysSeen(p.mask, queries, Chunk(p.keys, j, chunks));
        if (keys.begin < keys.end) pairs.push_back({slots, queries, keys});
      }
    }
    context.parallel.Run(pairs.size(), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const auto& [slots, queries, keys] = pairs[i];
        if (bf16_products) {
          AttentionBackwardChunkBf16(p, slots, queries, keys);
        } else {
          HWY_DYNAMIC_DISPATCH(AttentionBackwardChunk)(p, slots, queries, keys);
        }
      }
    });
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
