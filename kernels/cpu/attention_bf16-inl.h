// Products of bf16 pairs that lie in cache, and the packing that makes the pairs: the inner loops
// of attention on processors with AVX-512 BF16, which Highway 1.0.3 has no target for. A pair is
// two numbers next to each other along the dimension that is summed over, in one 32-bit lane. B and
// C have their columns in vector lanes; A is read one pair at a time.
//
// Everything between UPIPE_BF16_BEGIN and UPIPE_BF16_END is compiled for that processor; it is in
// anonymous namespaces, so that the linker cannot hand it to others, and every include comes
// before.
#pragma once

// GCC 12 takes the intrinsics' own "undefined" operands for mistakes (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/rounding.h"
#include "kernels/api/tensor_view.h"

#define UPIPE_BF16_BEGIN      \
  _Pragma("GCC push_options") \
      _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma\")")
#define UPIPE_BF16_END _Pragma("GCC pop_options")

UPIPE_BF16_BEGIN
namespace upipe::kernels::cpu {
namespace {

using Pair = uint32_t;  // the earlier number in the lower half

constexpr int64_t kBf16Lanes = 16;              // fp32 numbers or pairs of a vector
constexpr int64_t kBf16Panel = 2 * kBf16Lanes;  // columns of a full tile
constexpr int64_t kBf16Rows = 8;                // rows of a tile

// The first `count` of 16 or 32 lanes; all when count is larger.
inline __mmask16 FirstLanes(int64_t count) {
  return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(0, count)) - 1);
}

inline __m512bh AsPairs(__m512i v) { return (__m512bh)v; }

// The lower half to `out`, the upper one `stride` pairs later.
inline void StoreHalves(__m512i v, int64_t stride, Pair* out) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_castsi512_si256(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + stride), _mm512_extracti64x4_epi64(v, 1));
}

struct PairOperands {
  const Pair* a;
  int64_t a_stride;
  const Pair* b;  // [depth, columns]
  int64_t b_stride;
  int64_t depth;  // pairs
};

// sum += A B over kRows rows and kVectors vectors of columns. A's pair (row, depth) lies at
// a[row * stride + depth], or a[depth * stride + row] when kByColumn.
template <int kRows, int kVectors, bool kByColumn>
inline void MultiplyPairs(const PairOperands& t, __m512 (&sum)[kRows][kVectors]) {
  const Pair *a = t.a, *b = t.b;
  const int64_t a_stride = t.a_stride, b_stride = t.b_stride;
  for (int64_t k = 0; k < t.depth; ++k) {
    __m512bh columns[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      columns[j] = AsPairs(_mm512_loadu_si512(b + j * kBf16Lanes));
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const __m512bh row =
          AsPairs(_mm512_set1_epi32(static_cast<int>(kByColumn ? a[i] : a[i * a_stride])));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], row, columns[j]);
    }
    b += b_stride;
    a += kByColumn ? a_stride : 1;
  }
}

// 2^f on [-0.5, 0.5], lowest power first: relative error 1.1e-7 of six terms, 2.9e-6 of five.
constexpr float kExp2SixTerms[] = {
    1.0f, 6.931470037e-01f, 2.402224243e-01f, 5.550733954e-02f, 9.671512991e-03f, 1.326471218e-03f};
constexpr float kExp2FiveTerms[] = {1.0f, 6.931241751e-01f, 2.402409911e-01f, 5.590642989e-02f,
                                    9.582851082e-03f};

// 2^x for x <= 127; below -126 it stays near 2^-126. NaN stays NaN.
template <int kTerms>
inline __m512 Exp2(__m512 x, const float (&polynomial)[kTerms]) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);     // the second operand when either is NaN
  const __m512 shifted = _mm512_add_ps(x, magic);
  const __m512 f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, magic));
  __m512 p = _mm512_set1_ps(polynomial[kTerms - 1]);
#pragma GCC unroll 8
  for (int i = kTerms - 2; i >= 0; --i) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(polynomial[i]));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p),
                                              _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}

// 16 numbers of `first` and of `second`, rounded to nearest even, as they are: first's in the lower
// half.
inline __m512i RoundTwo(__m512 first, __m512 second) {
  return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// Lane i becomes the pair of numbers i and 16 + i.
inline __m512i PairHalves(__m512i v) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), v);
}

inline const uint16_t* Bf16Row(const TensorView& view, int64_t i, int64_t j) {
  return static_cast<const uint16_t*>(view.data) + i * view.stride[0] + j * view.stride[1];
}

// The first `count` of 32 numbers of a row; all when count is larger.
inline __m512i LoadBf16(const uint16_t* row, int64_t count) {
  return count >= 32 ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((1u << count) - 1, row);
}

// Pairs of two rows at elements e .. e + 31 of n, zero beyond; a null second row is zeros.
struct TwoVectors {
  __m512i low, high;
};
inline TwoVectors PairRows(const uint16_t* first, const uint16_t* second, int64_t e, int64_t n) {
  alignas(64) static constexpr uint16_t kLow[32] = {0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,
                                                    37, 6,  38, 7,  39, 8,  40, 9,  41, 10, 42,
                                                    11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  alignas(64) static constexpr uint16_t kHigh[32] = {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21,
                                                     53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58,
                                                     27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
  const __m512i a = LoadBf16(first + e, n - e);
  const __m512i b = second == nullptr ? _mm512_setzero_si512() : LoadBf16(second + e, n - e);
  return {_mm512_permutex2var_epi16(a, _mm512_load_si512(kLow), b),
          _mm512_permutex2var_epi16(a, _mm512_load_si512(kHigh), b)};
}

// Rows [first, first + count) of one head with pairs along head_dim: [padded_count, pairs], zeros
// where there is nothing.
inline void PackRows(const TensorView& view, int64_t first, int64_t head, int64_t count,
                     int64_t padded_count, int64_t pairs, Pair* out) {
  const int64_t head_dim = view.shape[2];
  for (int64_t i = 0; i < count; ++i, out += pairs) {
    const uint16_t* row = Bf16Row(view, first + i, head);
    int64_t e = 0;
    for (; e + 32 <= head_dim; e += 32) _mm512_storeu_si512(out + e / 2, LoadBf16(row + e, 32));
    if (e < head_dim) {
      _mm512_mask_storeu_epi32(out + e / 2, FirstLanes(pairs - e / 2),
                               LoadBf16(row + e, head_dim - e));
    }
  }
  std::memset(out, 0, (padded_count - count) * pairs * sizeof(Pair));
}

// The transpose of PackRows in panels of kBf16Panel rows: [panels, pairs, kBf16Panel], panels that
// hold `count` rows. `flip` is exclusive-ored into every pair.
inline void PackColumns(const TensorView& view, int64_t first, int64_t head, int64_t count,
                        int64_t pairs, Pair flip, Pair* out) {
  const int64_t head_dim = view.shape[2];
  std::memset(out, 0, RoundUp(count, kBf16Panel) * pairs * sizeof(Pair));
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t* row = Bf16Row(view, first + i, head);
    Pair* column = out + i / kBf16Panel * pairs * kBf16Panel + i % kBf16Panel;
    for (int64_t e = 0; e < head_dim / 2; ++e) {
      Pair pair;
      std::memcpy(&pair, row + 2 * e, sizeof(pair));
      column[e * kBf16Panel] = pair ^ flip;
    }
    if (head_dim % 2 != 0) {
      column[head_dim / 2 * kBf16Panel] = row[head_dim - 1] ^ (flip & 0xffffu);
    }
  }
}

// Rows [first, first + count) of one head with pairs along the rows, in panels of kBf16Panel
// elements: [panels, panel_depth, kBf16Panel], zeros beyond the rows up to `padded_count`, even.
inline void PackPairs(const TensorView& view, int64_t first, int64_t head, int64_t count,
                      int64_t padded_count, int64_t panel_depth, Pair* out) {
  const int64_t head_dim = view.shape[2], rows = RoundUp(count, 2);
  for (int64_t i = 0; i < rows; i += 2) {
    const uint16_t* earlier = Bf16Row(view, first + i, head);
    const uint16_t* later = i + 1 < count ? Bf16Row(view, first + i + 1, head) : nullptr;
    Pair* row = out + i / 2 * kBf16Panel;
    for (int64_t e = 0; e < head_dim; e += kBf16Panel, row += panel_depth * kBf16Panel) {
      const TwoVectors pairs = PairRows(earlier, later, e, head_dim);
      _mm512_store_si512(row, pairs.low);
      _mm512_store_si512(row + kBf16Lanes, pairs.high);
    }
  }
  for (int64_t e = 0; e < head_dim; e += kBf16Panel, out += panel_depth * kBf16Panel) {
    std::memset(out + rows / 2 * kBf16Panel, 0,
                (padded_count - rows) / 2 * kBf16Panel * sizeof(Pair));
  }
}

}  // namespace
}  // namespace upipe::kernels::cpu
UPIPE_BF16_END
