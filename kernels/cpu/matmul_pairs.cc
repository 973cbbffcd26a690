#include "kernels/cpu/matmul_pairs.h"

#include "kernels/cpu/attention_bf16-inl.h"

UPIPE_BF16_BEGIN
namespace upipe::kernels::cpu {
namespace {

static_assert(kPairPanel == kBf16Panel);

// One operand of a product: `sides` rows (of a) or columns (of b) by `depth`.
struct Operand {
  const uint16_t* data;
  int64_t stride;
  bool along_depth;  // a side's numbers lie next to each other; otherwise those of one depth
  int64_t sides, depth;
};

// Transposes 16 vectors of 16 pairs.
inline void Transpose(__m512i (&v)[16]) {
  __m512i w[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
  }
  // v[4 g + c] holds in each quarter q column 4 q + c of rows 4 g .. 4 g + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i low01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0x88);
    const __m512i low23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0x88);
    const __m512i high01 = _mm512_shuffle_i32x4(v[c], v[4 + c], 0xdd);
    const __m512i high23 = _mm512_shuffle_i32x4(v[8 + c], v[12 + c], 0xdd);
    w[c] = _mm512_shuffle_i32x4(low01, low23, 0x88);
    w[8 + c] = _mm512_shuffle_i32x4(low01, low23, 0xdd);
    w[4 + c] = _mm512_shuffle_i32x4(high01, high23, 0x88);
    w[12 + c] = _mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = w[i];
}

// Half a panel, [pairs, kBf16Lanes] in rows of kBf16Panel, of sides whose numbers lie next to each
// other.
inline void PackHalfPanel(const Operand& x, int64_t first, Pair* out) {
  for (int64_t k = 0; k < x.depth; k += 32) {
    __m512i v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      v[i] = first + i < x.sides ? LoadBf16(x.data + (first + i) * x.stride + k, x.depth - k)
                                 : _mm512_setzero_si512();
    }
    Transpose(v);
    const int64_t pairs = std::min<int64_t>(16, CeilDiv(x.depth - k, 2));
    if (pairs == 16) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out + (k / 2 + i) * kBf16Panel, v[i]);
    } else {
      alignas(64) Pair rows[16][kBf16Lanes];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) _mm512_store_si512(rows[i], v[i]);
      for (int64_t i = 0; i < pairs; ++i) {
        std::memcpy(out + (k / 2 + i) * kBf16Panel, rows[i], sizeof(rows[i]));
      }
    }
  }
}

// [panels, pairs, kBf16Panel], zeros beyond the sides and the depth.
void Pack(const Operand& x, Pair* out) {
  const int64_t panel = CeilDiv(x.depth, 2) * kBf16Panel;
  if (x.along_depth) {
    for (int64_t side = 0; side < x.sides; side += kBf16Panel, out += panel) {
      PackHalfPanel(x, side, out);
      PackHalfPanel(x, side + kBf16Lanes, out + kBf16Lanes);
    }
    return;
  }
  for (int64_t k = 0; k < x.depth; k += 2, out += kBf16Panel) {
    const uint16_t* earlier = x.data + k * x.stride;
    const uint16_t* later = k + 1 < x.depth ? earlier + x.stride : nullptr;
    Pair* to = out;
    for (int64_t side = 0; side < x.sides; side += kBf16Panel, to += panel) {
      const TwoVectors pairs = PairRows(earlier, later, side, x.sides);
      _mm512_store_si512(to, pairs.low);
      _mm512_store_si512(to + kBf16Lanes, pairs.high);
    }
  }
}

// kBf16Rows rows and a panel of columns: their parts of the packed operands, and of c, of which
// only `rows` x `columns` are there.
struct Tile {
  const Pair* a;
  const Pair* b;
  int64_t pairs;
  float* c;
  int64_t c_stride;
  int64_t rows, columns;
  float alpha, beta;
};

void MultiplyTile(const Tile& t) {
  const __mmask16 masks[2] = {FirstLanes(t.columns), FirstLanes(t.columns - kBf16Lanes)};
  const int64_t rows = std::min(kBf16Rows, t.rows);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < kBf16Panel; j += kBf16Lanes) {
      _mm_prefetch(t.c + i * t.c_stride + j, _MM_HINT_T0);  // worth a tenth where c is large
    }
  }
  __m512 sum[kBf16Rows][2] = {};
  MultiplyPairs<kBf16Rows, 2, /*kByColumn=*/true>(
      {.a = t.a, .a_stride = kBf16Panel, .b = t.b, .b_stride = kBf16Panel, .depth = t.pairs}, sum);
  const __m512 alpha = _mm512_set1_ps(t.alpha), beta = _mm512_set1_ps(t.beta);
#pragma GCC unroll 8
  for (int i = 0; i < kBf16Rows; ++i) {
    if (i >= rows) return;
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      float* c = t.c + i * t.c_stride + j * kBf16Lanes;
      __m512 result = _mm512_mul_ps(alpha, sum[i][j]);
      if (t.beta != 0) {
        result = _mm512_fmadd_ps(beta, _mm512_maskz_loadu_ps(masks[j], c), result);
      }
      _mm512_mask_storeu_ps(c, masks[j], result);
    }
  }
}

}  // namespace

void MultiplyPairBlock(const PairBlock& p, void* scratch) {
  const int64_t pairs = CeilDiv(p.depth, 2);
  Pair* a = static_cast<Pair*>(scratch);
  Pair* b = a + RoundUp(p.rows, kBf16Panel) * pairs;
  Pack({p.a, p.a_stride, !p.transpose_a, p.rows, p.depth}, a);
  Pack({p.b, p.b_stride, p.transpose_b, p.columns, p.depth}, b);
  for (int64_t j = 0; j < p.columns; j += kBf16Panel) {
    for (int64_t i = 0; i < p.rows; i += kBf16Rows) {
      MultiplyTile({.a = a + i / kBf16Panel * kBf16Panel * pairs + i % kBf16Panel,
                    .b = b + j * pairs,
                    .pairs = pairs,
                    .c = p.c + i * p.c_stride + j,
                    .c_stride = p.c_stride,
                    .rows = p.rows - i,
                    .columns = p.columns - j,
                    .alpha = p.alpha,
                    .beta = p.beta});
    }
  }
}

}  // namespace upipe::kernels::cpu
UPIPE_BF16_END
