// Attention forward, flash style (arXiv 2205.14135, 2307.08691): a block of queries stays in cache,
// key tiles that some of it sees stream past, scores never leave a [kKeyTile, kPanel] tile. Queries
// lie in vector lanes, so running maximum, running sum and masks are plain vector arithmetic. bf16
// is converted as tiles are loaded, where attention_fwd_bf16.cc cannot take it.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/attention_mask.h"
#include "kernels/cpu/attention_merge.h"
#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/isa.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_fwd.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/attention_rows-inl.h"
#include "kernels/cpu/gemm_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kKeyTile = 64;
constexpr int64_t kMaxQueries = 256;  // of a block
constexpr int64_t kBlockFloats = 32768;
constexpr int64_t kTileFloats = kKeyTile * RowStride(kMaxHeadDim);
static_assert(kPanel * kMaxHeadDim <= kBlockFloats);
static_assert(kMaxQueries % kPanel == 0);

// One query block of one head. Panels are kPanel queries side by side.
struct ForwardBlock {
  alignas(64) float queries[kBlockFloats];  // [panels, head_dim, kPanel], times scale * log2(e)
  alignas(64) float out[kBlockFloats];      // [panels, head_dim, kPanel], relative to max
  alignas(64) float scores[kKeyTile * kPanel];
  alignas(64) float keys[kTileFloats];    // of the tile, [kKeyTile, RowStride(head_dim)]
  alignas(64) float values[kTileFloats];  // of the tile
  ComingRows next_keys, next_values;
  alignas(64) float max[kMaxQueries];  // of the base-2 scores so far
  alignas(64) float sum[kMaxQueries];  // of 2^(score - max)
  alignas(64) float factor[kPanel];
};

// scores = -infinity where the query (lane) does not see the key (row).
void MaskScores(const AttentionMask& mask, PositionRun queries, PositionRun keys, float* scores) {
  const F32 d;
  const VecF32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t key = keys.begin; key < keys.end; ++key, scores += kPanel) {
    const PositionRun seen =
        Intersection(VisibleQueries(mask, key), {queries.begin, queries.begin + kPanel});
    for (int64_t j = 0; j < kPanel; j += kLanes) {
      const auto visible = LanesWithin(j, seen.begin - queries.begin, seen.end - queries.begin);
      hn::Store(hn::IfThenElse(visible, hn::Load(d, scores + j), hidden), d, scores + j);
    }
  }
}

// Scores [num_keys, kPanel] become 2^(score - max) under the new maximum; factor is what the old
// sums shrink by.
template <bool kMasked>
HWY_INLINE void SoftmaxTile(float* scores, int64_t num_keys, float* max, float* sum,
                            float* factor) {
  const F32 d;
  const VecF32 hidden = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < kPanel; j += kLanes) {
    const VecF32 old_max = hn::Load(d, max + j);
    VecF32 max0 = old_max, max1 = old_max;
    int64_t i = 0;
    for (; i + 2 <= num_keys; i += 2) {
      max0 = hn::Max(max0, hn::Load(d, scores + i * kPanel + j));
      max1 = hn::Max(max1, hn::Load(d, scores + (i + 1) * kPanel + j));
    }
    if (i < num_keys) max0 = hn::Max(max0, hn::Load(d, scores + i * kPanel + j));
    const VecF32 new_max = hn::Max(max0, max1);
    // A query that has seen no key yet keeps -infinity; zero stands in so that no difference is
    // NaN.
    const VecF32 shift = kMasked ? hn::IfThenZeroElse(hn::Eq(new_max, hidden), new_max) : new_max;
    VecF32 total = hn::Zero(d);
    for (i = 0; i < num_keys; ++i) {
      float* score = scores + i * kPanel + j;
      const VecF32 s = hn::Load(d, score);
      VecF32 weight = Exp2(hn::Sub(s, shift));
      if constexpr (kMasked) weight = hn::IfThenZeroElse(hn::Eq(s, hidden), weight);
      total = hn::Add(total, weight);
      hn::Store(weight, d, score);
    }
    const VecF32 shrink = Exp2(hn::Sub(old_max, shift));
    hn::Store(shrink, d, factor + j);
    hn::Store(hn::MulAdd(hn::Load(d, sum + j), shrink, total), d, sum + j);
    hn::Store(new_max, d, max + j);
  }
}

// Keys of one tile, K and V from the first of them on, join one panel of the block.
void ForwardTile(const AttentionFwdParams& p, PositionRun queries, PositionRun keys, const Rows& k,
                 const Rows& v, int64_t panel, ForwardBlock& block) {
  const int64_t head_dim = p.q.shape[2], num_keys = keys.end - keys.begin;
  const int64_t offset = panel * head_dim * kPanel;
  MultiplyPanel<kTileVectors, ReadA::kByRow, Into::kStore>({.a = k.data,
                                                            .a_stride = k.stride,
                                                            .b = block.queries + offset,
                                                            .b_stride = kPanel,
                                                            .c = block.scores,
                                                            .c_stride = kPanel,
                                                            .depth = head_dim,
                                                            .coming = &block.next_keys},
                                                           num_keys);
  float *max = block.max + panel * kPanel, *sum = block.sum + panel * kPanel;
  if (SeesAll(p.mask, queries, keys)) {
    SoftmaxTile<false>(block.scores, num_keys, max, sum, block.factor);
  } else {
    MaskScores(p.mask, queries, keys, block.scores);
    SoftmaxTile<true>(block.scores, num_keys, max, sum, block.factor);
  }
  MultiplyPanel<kTileVectors, ReadA::kByColumn, Into::kScaleThenAdd>({.a = v.data,
                                                                      .a_stride = v.stride,
                                                                      .b = block.scores,
                                                                      .b_stride = kPanel,
                                                                      .c = block.out + offset,
                                                                      .c_stride = kPanel,
                                                                      .depth = num_keys,
                                                                      .factor = block.factor,
                                                                      .coming = &block.next_values},
                                                                     head_dim);
}

void LoadQueries(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count,
                 int64_t panels, ForwardBlock& block) {
  const int64_t head_dim = p.q.shape[2];
  const float scale = p.scale * kLog2E;
  std::fill_n(block.queries, panels * head_dim * kPanel, 0.0f);
  std::fill_n(block.out, panels * head_dim * kPanel, 0.0f);
  std::fill_n(block.max, panels * kPanel, -std::numeric_limits<float>::infinity());
  std::fill_n(block.sum, panels * kPanel, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    alignas(64) float q[kMaxHeadDim];
    LoadRow(p.q, first + i, head, q);
    float* column = block.queries + i / kPanel * head_dim * kPanel + i % kPanel;
    for (int64_t e = 0; e < head_dim; ++e) column[e * kPanel] = scale * q[e];
  }
}

// One row of o from the sums of its column.
template <typename Out>
HWY_INLINE void StoreRow(const float* column, RowWeights weights, int64_t head_dim, Out* o) {
  for (int64_t e = 0; e < head_dim; ++e) {
    float value = column[e * kPanel] * weights.fresh;
    if constexpr (std::is_same_v<Out, BFloat16>) {
      o[e] = BFloat16::From(value);
    } else {
      if (weights.kept != 0) value += weights.kept * o[e];
      o[e] = value;
    }
  }
}

void StoreOutputs(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count,
                  const ForwardBlock& block) {
  const int64_t head_dim = p.q.shape[2];
  for (int64_t i = 0; i < count; ++i) {
    const float* column = block.out + i / kPanel * head_dim * kPanel + i % kPanel;
    const RowWeights weights = FinishRow(p, head, first + i, block.max[i], block.sum[i]);
    if (weights.unchanged()) continue;
    WithStorageType(p.o.dtype, [&](auto storage) HWY_ATTR {
      StoreRow(column, weights, head_dim, Ptr<decltype(storage)>(p.o, first + i, head));
    });
  }
}

// Queries [begin, end) of one head, at most AttentionQueryBlock(head_dim), which see keys within
// `reach` only.
void AttentionForwardBlock(const AttentionFwdParams& p, int64_t head, PositionRun block_queries,
                           PositionRun reach) {
  ForwardBlock block;
  const auto [begin, end] = block_queries;
  const int64_t first = begin - p.queries.begin, count = end - begin;
  const int64_t panels = (count + kPanel - 1) / kPanel;
  LoadQueries(p, head, first, count, panels, block);
  const int32_t slot = p.kv_slot[head];
  const int64_t head_dim = p.q.shape[2];
  for (int64_t key = reach.begin; key < reach.end; key += kKeyTile) {
    const PositionRun tile = {key, std::min(reach.end, key + kKeyTile)};
    const int64_t row = key - p.keys.begin, num_keys = tile.end - tile.begin;
    const Rows k = LoadRows(p.k, row, slot, num_keys, head_dim, block.keys);
    const Rows v = LoadRows(p.v, row, slot, num_keys, head_dim, block.values);
    const PositionRun next = Intersection({tile.end, tile.end + kKeyTile}, reach);
    const int64_t next_row = next.begin - p.keys.begin, num_next = next.end - next.begin;
    block.next_keys = ComingRows(p.k, next_row, slot, num_next, kKeyTile / kTileRows * panels);
    block.next_values =
        ComingRows(p.v, next_row, slot, num_next, head_dim / kTileRows * panels + 1);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t query = begin + panel * kPanel;
      const PositionRun queries = {query, std::min(end, query + kPanel)};
      const PositionRun keys = KeysSeen(p.mask, queries, tile);
      if (keys.begin == keys.end) continue;
      const int64_t skipped = keys.begin - tile.begin;
      ForwardTile(p, queries, keys, {k.data + skipped * k.stride, k.stride},
                  {v.data + skipped * v.stride, v.stride}, panel, block);
    }
  }
  StoreOutputs(p, head, first, count, block);
}

// Queries of a block: a multiple of the panel that fits the tile.
int64_t AttentionQueryBlock(int64_t head_dim) {
  return std::max<int64_t>(1, std::min(kMaxQueries, kBlockFloats / head_dim) / kPanel) * kPanel;
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(AttentionForwardBlock);
HWY_EXPORT(AttentionQueryBlock);

absl::Status CheckHeadDim(int64_t head_dim) {
  if (head_dim <= kMaxHeadDim) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("attention: head_dim ", head_dim, " is above ",
                                                 kMaxHeadDim,
                                                 ", the largest the cpu backend has tiles for"));
}

absl::Status Backend::Run(const AttentionFwdParams& p, Workspace, ExecContext& context) {
  const int64_t tokens = p.q.shape[0], heads = p.q.shape[1], head_dim = p.q.shape[2];
  if (absl::Status ok = CheckHeadDim(head_dim); !ok.ok()) return ok;
  const bool bf16_products = p.q.dtype == DType::kBFloat16 && HasBf16Products();
  const int64_t size = bf16_products ? Bf16QueryBlock(head_dim)
                                     : HWY_DYNAMIC_DISPATCH(AttentionQueryBlock)(head_dim);
  const int64_t blocks = (tokens + size - 1) / size;
  context.parallel.Run(heads * blocks, [&](int64_t begin, int64_t end, int) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t first = BalancedBlock(index % blocks, blocks) * size;
      const int64_t count = std::min(size, tokens - first), head = index / blocks;
      const PositionRun queries = {p.queries.begin + first, p.queries.begin + first + count};
      const PositionRun keys = KeysSeen(p.mask, queries, p.keys);
      if (keys.begin == keys.end) {
        FinishUnseen(p, head, first, count);
      } else if (bf16_products) {
        AttentionForwardBlockBf16(p, head, queries, keys);
      } else {
        HWY_DYNAMIC_DISPATCH(AttentionForwardBlock)(p, head, queries, keys);
      }
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
