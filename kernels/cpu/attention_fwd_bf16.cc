// Attention forward in bf16 products: as attention_fwd.cc, queries in vector lanes, but K and V of
// a tile are packed once per query block (K as it is, V in pairs of keys) and the probabilities
// leave the softmax as bf16 pairs of keys. Sums of probabilities are of the unrounded ones.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/attention_bf16-inl.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/attention_mask.h"
#include "kernels/cpu/attention_merge.h"
#include "kernels/cpu/attention_tiles.h"

UPIPE_BF16_BEGIN
namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kKeyTile = 128;
constexpr int64_t kMaxQueries = 256;  // of a block
constexpr int64_t kMaxPairs = kMaxHeadDim / 2;
constexpr int64_t kBlockNumbers = 256 * 128;  // queries times head_dim of a block
constexpr float kHidden = -std::numeric_limits<float>::infinity();
static_assert(kBf16Panel * kMaxHeadDim <= kBlockNumbers);

// One query block of one head. Panels are kBf16Panel queries side by side.
struct ForwardBlock {
  int64_t pairs;  // of head_dim, the last one half empty when that is odd
  int64_t width;  // head_dim rounded up to whole tiles
  ComingRows next_keys, next_values;
  alignas(
      64) Pair queries[kBlockNumbers / 2];  // [panels, pairs, kBf16Panel], sign of scale applied
  alignas(64) float out[kBlockNumbers];     // [panels, width, kBf16Panel], relative to max
  alignas(64) Pair keys[kKeyTile * kMaxPairs];          // [kKeyTile, pairs]
  alignas(64) Pair values[kKeyTile / 2 * kMaxHeadDim];  // [groups, kKeyTile / 2, kBf16Rows]
  alignas(64) float scores[kKeyTile * kBf16Panel];      // unscaled
  alignas(64) Pair weights[kKeyTile / 2 * kBf16Panel];  // pairs of keys
  alignas(64) float max[kMaxQueries];                   // of the base-2 scores so far
  alignas(64) float sum[kMaxQueries];                   // of 2^(score - max)
  alignas(64) float factor[kBf16Panel];                 // what a panel's old sums shrink by
};

// Scores of `rows` keys and one panel; `max` becomes the panel's largest.
void Scores(PairOperands t, int64_t rows, ForwardBlock& block, __m512 (&max)[2]) {
  float* scores = block.scores;
  max[0] = max[1] = _mm512_set1_ps(kHidden);
  for (; rows > 0; rows -= kBf16Rows) {
    block.next_keys.PrefetchStep();
    block.next_values.PrefetchStep();
    __m512 sum[kBf16Rows][2] = {};
    MultiplyPairs<kBf16Rows, 2, false>(t, sum);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
#pragma GCC unroll 8
      for (int i = 0; i < kBf16Rows; ++i) {
        _mm512_store_ps(scores + i * kBf16Panel + j * kBf16Lanes, sum[i][j]);
        max[j] = _mm512_max_ps(max[j], sum[i][j]);
      }
    }
    t.a += kBf16Rows * t.a_stride;
    scores += kBf16Rows * kBf16Panel;
  }
}

// scores = -infinity where the query (lane) does not see the key (row), and in rows beyond the
// keys.
void MaskScores(const AttentionMask& mask, PositionRun queries, PositionRun keys, int64_t rows,
                float* scores, __m512 (&max)[2]) {
  max[0] = max[1] = _mm512_set1_ps(kHidden);
  for (int64_t row = 0; row < rows; ++row, scores += kBf16Panel) {
    const int64_t key = keys.begin + row;
    const PositionRun seen =
        key < keys.end ? Intersection(VisibleQueries(mask, key), queries) : PositionRun{};
    const int64_t begin = seen.begin - queries.begin, end = seen.end - queries.begin;
    for (int64_t j = 0; j < 2; ++j) {
      float* score = scores + j * kBf16Lanes;
      const __mmask16 visible =
          FirstLanes(end - j * kBf16Lanes) & ~FirstLanes(begin - j * kBf16Lanes);
      const __m512 s = _mm512_mask_mov_ps(_mm512_set1_ps(kHidden), visible, _mm512_load_ps(score));
      _mm512_store_ps(score, s);
      max[j] = _mm512_max_ps(max[j], s);
    }
  }
}

// Scores [rows, kBf16Panel] become weights 2^(score * scale - max) under the new maximum, in pairs.
template <bool kMasked>
void SoftmaxTile(const float* scores, int64_t rows, float scale, const __m512 (&tile_max)[2],
                 Pair* weights, float* max, float* sum, float* factor) {
  const __m512 multiplier = _mm512_set1_ps(scale), hidden = _mm512_set1_ps(kHidden);
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const __m512 old_max = _mm512_load_ps(max + j * kBf16Lanes);
    __m512 new_max = _mm512_mul_ps(tile_max[j], multiplier);
    if constexpr (kMasked) {
      new_max = _mm512_mask_mov_ps(new_max, _mm512_cmpeq_ps_mask(tile_max[j], hidden), hidden);
    }
    new_max = _mm512_max_ps(old_max, new_max);
    // A query that has seen no key yet keeps -infinity; zero stands in so that no difference is
    // NaN.
    const __m512 shift =
        kMasked ? _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(new_max, hidden), new_max) : new_max;
    __m512 total0 = _mm512_setzero_ps(), total1 = _mm512_setzero_ps();
    const float* score = scores + j * kBf16Lanes;
    Pair* out = weights + j * kBf16Lanes;
    for (int64_t i = 0; i < rows; i += 2, score += 2 * kBf16Panel, out += kBf16Panel) {
      const __m512 s0 = _mm512_load_ps(score), s1 = _mm512_load_ps(score + kBf16Panel);
      __m512 w0 = Exp2(_mm512_fmsub_ps(s0, multiplier, shift), kExp2SixTerms);
      __m512 w1 = Exp2(_mm512_fmsub_ps(s1, multiplier, shift), kExp2SixTerms);
      if constexpr (kMasked) {
        w0 = _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(s0, hidden), w0);
        w1 = _mm512_maskz_mov_ps(_mm512_cmpneq_ps_mask(s1, hidden), w1);
      }
      total0 = _mm512_add_ps(total0, w0);
      total1 = _mm512_add_ps(total1, w1);
      _mm512_store_si512(out, PairHalves(RoundTwo(w0, w1)));
    }
    const __m512 shrink = Exp2(_mm512_sub_ps(old_max, shift), kExp2SixTerms);
    const __m512 old_sum = _mm512_load_ps(sum + j * kBf16Lanes);
    _mm512_store_ps(factor + j * kBf16Lanes, shrink);
    _mm512_store_ps(sum + j * kBf16Lanes,
                    _mm512_fmadd_ps(old_sum, shrink, _mm512_add_ps(total0, total1)));
    _mm512_store_ps(max + j * kBf16Lanes, new_max);
  }
}

// out = out * factor + V^T weights, `width` rows of one panel.
void AddValues(const Pair* values, const Pair* weights, int64_t depth, int64_t width,
               const float* factor, float* out) {
  for (int64_t e = 0; e < width; e += kBf16Rows, values += kKeyTile / 2 * kBf16Rows) {
    __m512 sum[kBf16Rows][2] = {};
    MultiplyPairs<kBf16Rows, 2, true>(
        {.a = values, .a_stride = kBf16Rows, .b = weights, .b_stride = kBf16Panel, .depth = depth},
        sum);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const __m512 shrink = _mm512_load_ps(factor + j * kBf16Lanes);
#pragma GCC unroll 8
      for (int i = 0; i < kBf16Rows; ++i) {
        float* c = out + (e + i) * kBf16Panel + j * kBf16Lanes;
        _mm512_store_ps(c, _mm512_fmadd_ps(_mm512_load_ps(c), shrink, sum[i][j]));
      }
    }
  }
}

// K of the tile as it is, V in pairs of keys and groups of kBf16Rows elements; zeros beyond the
// keys up to whole groups of them.
void PackTile(const AttentionFwdParams& p, int32_t slot, int64_t first, int64_t count,
              ForwardBlock& block) {
  constexpr int64_t kGroup = kKeyTile / 2 * kBf16Rows;
  const int64_t head_dim = p.v.shape[2], rows = RoundUp(count, kBf16Rows);
  PackRows(p.k, first, slot, count, rows, block.pairs, block.keys);
  for (int64_t i = 0; i < rows; i += 2) {
    const uint16_t* earlier = Bf16Row(p.v, first + std::min(i, count - 1), slot);
    const uint16_t* later = i + 1 < count ? Bf16Row(p.v, first + i + 1, slot) : nullptr;
    const int64_t n = i < count ? head_dim : 0;
    for (int64_t e = 0; e < block.width; e += 32) {
      const TwoVectors pairs = PairRows(earlier, later, e, std::max(n, e));
      Pair* out = block.values + e / kBf16Rows * kGroup + i / 2 * kBf16Rows;
      StoreHalves(pairs.low, kGroup, out);
      StoreHalves(pairs.high, kGroup, out + 2 * kGroup);
    }
  }
}

// Keys [begin, end) of the packed tile, begin even, join one panel of the block.
void ForwardTile(const AttentionFwdParams& p, PositionRun queries, PositionRun tile,
                 PositionRun keys, int64_t panel, ForwardBlock& block) {
  const int64_t first = keys.begin - tile.begin, num_keys = keys.end - keys.begin;
  const int64_t rows = RoundUp(num_keys, kBf16Rows);
  const float scale = std::abs(p.scale) * kLog2E;
  float *max = block.max + panel * kBf16Panel, *sum = block.sum + panel * kBf16Panel;
  __m512 tile_max[2];
  Scores({.a = block.keys + first * block.pairs,
          .a_stride = block.pairs,
          .b = block.queries + panel * block.pairs * kBf16Panel,
          .b_stride = kBf16Panel,
          .depth = block.pairs},
         rows, block, tile_max);
  if (rows == num_keys && SeesAll(p.mask, queries, keys)) {
    SoftmaxTile<false>(block.scores, rows, scale, tile_max, block.weights, max, sum, block.factor);
  } else {
    MaskScores(p.mask, queries, keys, rows, block.scores, tile_max);
    SoftmaxTile<true>(block.scores, rows, scale, tile_max, block.weights, max, sum, block.factor);
  }
  AddValues(block.values + first / 2 * kBf16Rows, block.weights, rows / 2, block.width,
            block.factor, block.out + panel * block.width * kBf16Panel);
}

void LoadQueries(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count,
                 ForwardBlock& block) {
  const int64_t head_dim = p.q.shape[2], panels = (count + kBf16Panel - 1) / kBf16Panel;
  block.pairs = (head_dim + 1) / 2;
  block.width = RoundUp(head_dim, kBf16Rows);
  // Softmax multiplies by |scale|, so that the largest score stays the largest.
  PackColumns(p.q, first, head, count, block.pairs, p.scale < 0 ? 0x80008000u : 0u, block.queries);
  std::fill_n(block.out, panels * block.width * kBf16Panel, 0.0f);
  std::fill_n(block.max, panels * kBf16Panel, kHidden);
  std::fill_n(block.sum, panels * kBf16Panel, 0.0f);
}

// One row of o, 16 numbers of `row` at a time; `row` is padded to whole vectors.
void StoreRow(const float* row, float kept, int64_t head_dim, void* o, DType dtype) {
  for (int64_t e = 0; e < head_dim; e += kBf16Lanes) {
    const __mmask16 inside = FirstLanes(head_dim - e);
    __m512 value = _mm512_load_ps(row + e);
    if (dtype == DType::kBFloat16) {
      _mm256_mask_storeu_epi16(static_cast<uint16_t*>(o) + e, inside,
                               (__m256i)_mm512_cvtneps_pbh(value));
      continue;
    }
    float* out = static_cast<float*>(o) + e;
    if (kept != 0) {
      value = _mm512_fmadd_ps(_mm512_set1_ps(kept), _mm512_maskz_loadu_ps(inside, out), value);
    }
    _mm512_mask_storeu_ps(out, inside, value);
  }
}

void StoreOutputs(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count,
                  const ForwardBlock& block) {
  const int64_t head_dim = p.q.shape[2];
  for (int64_t i = 0; i < count; ++i) {
    const float* column = block.out + i / kBf16Panel * block.width * kBf16Panel + i % kBf16Panel;
    const RowWeights weights = FinishRow(p, head, first + i, block.max[i], block.sum[i]);
    if (weights.unchanged()) continue;
    alignas(64) float row[RoundUp(kMaxHeadDim, kBf16Lanes)] = {};
    for (int64_t e = 0; e < head_dim; ++e) row[e] = column[e * kBf16Panel] * weights.fresh;
    StoreRow(row, weights.kept, head_dim, p.o.At(first + i, head), p.o.dtype);
  }
}

}  // namespace

void AttentionForwardBlockBf16(const AttentionFwdParams& p, int64_t head, PositionRun block_queries,
                               PositionRun reach) {
  ForwardBlock block;
  const auto [begin, end] = block_queries;
  const int64_t first = begin - p.queries.begin, count = end - begin;
  LoadQueries(p, head, first, count, block);
  const int32_t slot = p.kv_slot[head];
  for (int64_t key = reach.begin; key < reach.end; key += kKeyTile) {
    const PositionRun tile = {key, std::min(reach.end, key + kKeyTile)};
    PackTile(p, slot, key - p.keys.begin, tile.end - tile.begin, block);
    const PositionRun next = Intersection({tile.end, tile.end + kKeyTile}, reach);
    block.next_keys =
        ComingRows(p.k, next.begin - p.keys.begin, slot, next.end - next.begin, kKeyTile);
    block.next_values =
        ComingRows(p.v, next.begin - p.keys.begin, slot, next.end - next.begin, kKeyTile);
    for (int64_t query = begin, panel = 0; query < end; query += kBf16Panel, ++panel) {
      const PositionRun queries = {query, std::min(end, query + kBf16Panel)};
      PositionRun keys = KeysSeen(p.mask, queries, tile);
      if (keys.begin == keys.end) continue;
      keys.begin -= (keys.begin - tile.begin) % kBf16Rows;  // whole pairs, whole packed rows
      ForwardTile(p, queries, tile, keys, panel, block);
    }
  }
  StoreOutputs(p, head, first, count, block);
}

int64_t Bf16QueryBlock(int64_t head_dim) {
  const int64_t most = kBlockNumbers / RoundUp(head_dim, kBf16Rows);
  return std::min(kMaxQueries, most / kBf16Panel * kBf16Panel);
}

}  // namespace upipe::kernels::cpu
UPIPE_BF16_END
