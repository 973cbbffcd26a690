// Attention backward in bf16 products: the tiles of attention_bwd.cc. Scores and dP of 4 queries
// and one panel of keys stay in registers until they are P and dS, which leave as bf16 in the pairs
// that the other products take: along the queries for dV and dK, along the keys for dQ. dS is
// unscaled; dQ and dK are scaled as they are added.
#include <algorithm>

#include "kernels/cpu/attention_bf16-inl.h"
#include "kernels/cpu/attention_bf16.h"
#include "kernels/cpu/attention_mask.h"
#include "kernels/cpu/attention_tiles.h"

UPIPE_BF16_BEGIN
namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kKeyTile = 128;
constexpr int64_t kQueryTile = 128;
constexpr int64_t kMaxPairs = kMaxHeadDim / 2;
constexpr int64_t kScoreRows = 4;  // queries of a tile of scores and dP

// One key tile of one slot, and the queries it meets.
struct BackwardTile {
  int64_t pairs;  // of head_dim, the last one half empty when that is odd
  int64_t width;  // head_dim rounded up to whole vectors
  ComingRows dq_rows, next_queries, next_douts;
  alignas(64) Pair keys_t[kKeyTile * kMaxPairs];           // [panels, pairs, kBf16Panel]
  alignas(64) Pair values_t[kKeyTile * kMaxPairs];         // [panels, pairs, kBf16Panel]
  alignas(64) Pair key_pairs[kKeyTile / 2 * kMaxHeadDim];  // [panels, kKeyTile / 2, kBf16Panel]
  alignas(64) float dk[kKeyTile * kMaxHeadDim];            // [kKeyTile, width], unscaled
  alignas(64) float dv[kKeyTile * kMaxHeadDim];            // [kKeyTile, width]
  alignas(64) Pair queries[kQueryTile * kMaxPairs];        // [kQueryTile, pairs]
  alignas(64) Pair douts[kQueryTile * kMaxPairs];          // [kQueryTile, pairs]
  alignas(64) Pair
      query_pairs[kQueryTile / 2 * kMaxHeadDim];  // [panels, kQueryTile / 2, kBf16Panel]
  alignas(64) Pair
      dout_pairs[kQueryTile / 2 * kMaxHeadDim];  // [panels, kQueryTile / 2, kBf16Panel]
  // P and dS in pairs of queries, [kKeyTile / kBf16Lanes, kQueryTile / 2, kBf16Lanes].
  alignas(64) Pair probabilities[kQueryTile / 2 * kKeyTile];
  alignas(64) Pair gradients[kQueryTile / 2 * kKeyTile];
  alignas(64) Pair gradient_rows[kQueryTile * kKeyTile / 2];  // dS in pairs of keys
  // Of each query: log-sum-exp of the base-2 scores, delta, and the keys of the tile it sees.
  alignas(64) float lse[kQueryTile];
  alignas(64) float delta[kQueryTile];
  PositionRun seen[kQueryTile];
};

// A row of P and dS from scores and dP, zero in hidden lanes.
struct RowGradient {
  __m512 probability;
  __m512 score;
};
template <bool kMasked>
inline RowGradient GradientOf(__m512 score, __m512 dp, __m512 scale, float lse, float delta,
                              __mmask16 visible) {
  __m512 p = Exp2(_mm512_fmsub_ps(score, scale, _mm512_set1_ps(lse)), kExp2FiveTerms);
  if constexpr (kMasked) p = _mm512_maskz_mov_ps(visible, p);
  __m512 ds = _mm512_mul_ps(p, _mm512_sub_ps(dp, _mm512_set1_ps(delta)));
  if constexpr (kMasked) ds = _mm512_maskz_mov_ps(visible, ds);
  return {p, ds};
}

// P and dS of `rows` queries and the panel of keys [first, first + kBf16Panel) of the tile.
template <bool kMasked>
void GradientPanel(int64_t rows, int64_t first, float base2_scale, BackwardTile& tile) {
  const __m512 scale = _mm512_set1_ps(base2_scale);
  const int64_t pairs = tile.pairs;
  for (int64_t query = 0; query < rows; query += kScoreRows) {
    tile.dq_rows.PrefetchStep();
    tile.next_queries.PrefetchStep();
    tile.next_douts.PrefetchStep();
    __m512 score[kScoreRows][2] = {}, dp[kScoreRows][2] = {};
    const Pair *keys = tile.keys_t + first * pairs, *values = tile.values_t + first * pairs;
    const Pair *queries = tile.queries + query * pairs, *douts = tile.douts + query * pairs;
    for (int64_t k = 0; k < pairs; ++k, keys += kBf16Panel, values += kBf16Panel) {
      const __m512bh k0 = AsPairs(_mm512_load_si512(keys)),
                     k1 = AsPairs(_mm512_load_si512(keys + kBf16Lanes));
      const __m512bh v0 = AsPairs(_mm512_load_si512(values)),
                     v1 = AsPairs(_mm512_load_si512(values + kBf16Lanes));
#pragma GCC unroll 4
      for (int i = 0; i < kScoreRows; ++i) {
        const __m512bh q = AsPairs(_mm512_set1_epi32(static_cast<int>(queries[i * pairs + k])));
        const __m512bh d = AsPairs(_mm512_set1_epi32(static_cast<int>(douts[i * pairs + k])));
        score[i][0] = _mm512_dpbf16_ps(score[i][0], q, k0);
        score[i][1] = _mm512_dpbf16_ps(score[i][1], q, k1);
        dp[i][0] = _mm512_dpbf16_ps(dp[i][0], d, v0);
        dp[i][1] = _mm512_dpbf16_ps(dp[i][1], d, v1);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < kScoreRows; i += 2) {
      const int64_t row = query + i;
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const int64_t key = first + j * kBf16Lanes;
        __mmask16 visible[2] = {};
        if constexpr (kMasked) {
          for (int r = 0; r < 2; ++r) {
            const PositionRun seen = tile.seen[row + r];
            visible[r] = FirstLanes(seen.end - key) & ~FirstLanes(seen.begin - key);
          }
        }
        const RowGradient earlier = GradientOf<kMasked>(score[i][j], dp[i][j], scale, tile.lse[row],
                                                        tile.delta[row], visible[0]);
        const RowGradient later =
            GradientOf<kMasked>(score[i + 1][j], dp[i + 1][j], scale, tile.lse[row + 1],
                                tile.delta[row + 1], visible[1]);
        const int64_t at = (key / kBf16Lanes * (kQueryTile / 2) + row / 2) * kBf16Lanes;
        _mm512_store_si512(tile.probabilities + at,
                           PairHalves(RoundTwo(earlier.probability, later.probability)));
        const __m512i ds = RoundTwo(earlier.score, later.score);
        _mm512_store_si512(tile.gradients + at, PairHalves(ds));
        StoreHalves(ds, kKeyTile / 2, tile.gradient_rows + (row * kKeyTile + key) / 2);
      }
    }
  }
}

// C += scale * A B, `rows` <= kBf16Rows rows and the first `columns` of kVectors vectors.
template <int kVectors, bool kByColumn>
inline void AddTile(const PairOperands& t, float scale, float* c, int64_t c_stride, int64_t rows,
                    int64_t columns) {
  __m512 sum[kBf16Rows][kVectors] = {};
  MultiplyPairs<kBf16Rows, kVectors, kByColumn>(t, sum);
  const __m512 multiplier = _mm512_set1_ps(scale);
#pragma GCC unroll 8
  for (int i = 0; i < kBf16Rows; ++i) {
    if (i >= rows) break;
#pragma GCC unroll 2
    for (int j = 0; j < kVectors; ++j) {
      float* out = c + i * c_stride + j * kBf16Lanes;
      const __mmask16 inside = FirstLanes(columns - j * kBf16Lanes);
      _mm512_mask_storeu_ps(
          out, inside, _mm512_fmadd_ps(sum[i][j], multiplier, _mm512_maskz_loadu_ps(inside, out)));
    }
  }
}

// dv and dk of the keys [begin, end) of the tile: += P^T dO and dS^T Q.
void AddKeyGradients(const Pair* weights, const Pair* row_pairs, int64_t rows, int64_t begin,
                     int64_t end, const BackwardTile& tile, float* out) {
  for (int64_t e = 0; e < tile.width; e += kBf16Panel) {
    for (int64_t key = begin; key < end; key += kBf16Rows) {
      const PairOperands t = {
          .a = weights + key / kBf16Lanes * (kQueryTile / 2) * kBf16Lanes + key % kBf16Lanes,
          .a_stride = kBf16Lanes,
          .b = row_pairs + e * (kQueryTile / 2),
          .b_stride = kBf16Panel,
          .depth = rows / 2};
      float* c = out + key * tile.width + e;
      if (tile.width - e >= kBf16Panel) {
        AddTile<2, true>(t, 1.0f, c, tile.width, kBf16Rows, kBf16Panel);
      } else {
        AddTile<1, true>(t, 1.0f, c, tile.width, kBf16Rows, kBf16Lanes);
      }
    }
  }
}

// dQ += scale * dS K over the keys [begin, end) of the tile.
void AddQueryGradient(const AttentionBwdParams& p, int64_t head, int64_t first, int64_t count,
                      int64_t begin, int64_t end, const BackwardTile& tile) {
  const int64_t head_dim = p.q.shape[2];
  for (int64_t e = 0; e < tile.width; e += kBf16Panel) {
    for (int64_t i = 0; i < count; i += kBf16Rows) {
      const PairOperands t = {.a = tile.gradient_rows + (i * kKeyTile + begin) / 2,
                              .a_stride = kKeyTile / 2,
                              .b = tile.key_pairs + e * (kKeyTile / 2) + begin / 2 * kBf16Panel,
                              .b_stride = kBf16Panel,
                              .depth = (end - begin) / 2};
      float* c = static_cast<float*>(p.dq.At(first + i, head, e));
      if (tile.width - e >= kBf16Panel) {
        AddTile<2, false>(t, p.scale, c, p.dq.stride[0], count - i, head_dim - e);
      } else {
        AddTile<1, false>(t, p.scale, c, p.dq.stride[0], count - i, head_dim - e);
      }
    }
  }
}

// Q, dO and what the rows of P and dS need; rows beyond the queries see nothing.
void LoadQueries(const AttentionBwdParams& p, int64_t head, PositionRun queries, PositionRun keys,
                 int64_t rows, BackwardTile& tile) {
  const int64_t first = queries.begin - p.queries.begin, count = queries.end - queries.begin;
  PackRows(p.q, first, head, count, rows, tile.pairs, tile.queries);
  PackRows(p.dout, first, head, count, rows, tile.pairs, tile.douts);
  PackPairs(p.q, first, head, count, rows, kQueryTile / 2, tile.query_pairs);
  PackPairs(p.dout, first, head, count, rows, kQueryTile / 2, tile.dout_pairs);
  for (int64_t i = 0; i < rows; ++i) {
    if (i < count) {
      const PositionRun seen = Intersection(VisibleKeys(p.mask, queries.begin + i), keys);
      tile.seen[i] = {seen.begin - keys.begin, seen.end - keys.begin};
      tile.lse[i] = *static_cast<const float*>(p.lse.At(head, first + i)) * kLog2E;
      tile.delta[i] = *static_cast<const float*>(p.delta.At(first + i, head));
    } else {
      tile.seen[i] = {0, 0};
      tile.lse[i] = tile.delta[i] = 0;
    }
  }
}

// The queries of one tile meet the loaded key tile; `next` will be the queries after them.
void BackwardQueries(const AttentionBwdParams& p, int64_t head, PositionRun queries,
                     PositionRun next, PositionRun keys, BackwardTile& tile) {
  const PositionRun reach = KeysSeen(p.mask, queries, keys);
  if (reach.begin == reach.end) return;
  const int64_t count = queries.end - queries.begin, rows = RoundUp(count, kBf16Rows);
  const int64_t begin = (reach.begin - keys.begin) / kBf16Panel * kBf16Panel;
  const int64_t end = RoundUp(reach.end - keys.begin, kBf16Panel);
  LoadQueries(p, head, queries, keys, rows, tile);
  const int64_t first = queries.begin - p.queries.begin, num_next = next.end - next.begin;
  tile.dq_rows = ComingRows(p.dq, first, head, count, kQueryTile);
  tile.next_queries = ComingRows(p.q, first + count, head, num_next, kQueryTile);
  tile.next_douts = ComingRows(p.dout, first + count, head, num_next, kQueryTile);
  for (int64_t panel = begin; panel < end; panel += kBf16Panel) {
    const PositionRun run = {keys.begin + panel, keys.begin + panel + kBf16Panel};
    if (rows == count && run.end <= keys.end && SeesAll(p.mask, queries, run)) {
      GradientPanel<false>(rows, panel, p.scale * kLog2E, tile);
    } else {
      GradientPanel<true>(rows, panel, p.scale * kLog2E, tile);
    }
  }
  AddKeyGradients(tile.probabilities, tile.dout_pairs, rows, begin, end, tile, tile.dv);
  AddKeyGradients(tile.gradients, tile.query_pairs, rows, begin, end, tile, tile.dk);
  AddQueryGradient(p, head, first, count, begin, end, tile);
}

void AddRows(const float* sums, float scale, const BackwardTile& tile, const TensorView& out,
             int64_t first, int32_t slot, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    auto* row = static_cast<float*>(out.At(first + i, slot));
    for (int64_t e = 0; e < out.shape[2]; ++e) row[e] += scale * sums[i * tile.width + e];
  }
}

}  // namespace

void AttentionBackwardChunkBf16(const AttentionBwdParams& p, const KvHeadSlots& slots,
                                PositionRun query_chunk, PositionRun key_chunk) {
  BackwardTile tile;
  tile.pairs = (p.q.shape[2] + 1) / 2;
  tile.width = RoundUp(p.q.shape[2], kBf16Lanes);
  for (int64_t key = key_chunk.begin; key < key_chunk.end; key += kKeyTile) {
    const PositionRun keys = {key, std::min(key_chunk.end, key + kKeyTile)};
    const int64_t first = key - p.keys.begin, count = keys.end - keys.begin;
    const PositionRun queries = QueriesSeeing(p.mask, keys, query_chunk);
    if (queries.begin == queries.end) continue;
    PackColumns(p.k, first, slots.kv, count, tile.pairs, 0, tile.keys_t);
    PackColumns(p.v, first, slots.kv, count, tile.pairs, 0, tile.values_t);
    PackPairs(p.k, first, slots.kv, count, RoundUp(count, kBf16Panel), kKeyTile / 2,
              tile.key_pairs);
    std::fill_n(tile.dk, RoundUp(count, kBf16Panel) * tile.width, 0.0f);
    std::fill_n(tile.dv, RoundUp(count, kBf16Panel) * tile.width, 0.0f);
    for (int64_t head = 0; head < p.q.shape[1]; ++head) {
      if (p.kv_slot[head] != slots.kv) continue;
      for (int64_t query = queries.begin; query < queries.end; query += kQueryTile) {
        const int64_t end = std::min(queries.end, query + kQueryTile);
        const PositionRun next = {end, std::min(queries.end, end + kQueryTile)};
        BackwardQueries(p, head, {query, end}, next, keys, tile);
      }
    }
    AddRows(tile.dk, p.scale, tile, p.dk, first, slots.gradient, count);
    AddRows(tile.dv, 1.0f, tile, p.dv, first, slots.gradient, count);
  }
}

}  // namespace upipe::kernels::cpu
UPIPE_BF16_END
