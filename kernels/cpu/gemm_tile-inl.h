// Register-blocked products of small matrices that lie in cache: the inner loops of attention. B
// and C are row-major with their columns in vector lanes; A is read one element at a time, by rows
// or by columns. Included once per target.
#if defined(UPIPE_KERNELS_CPU_GEMM_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef UPIPE_KERNELS_CPU_GEMM_TILE_INL_H_
#undef UPIPE_KERNELS_CPU_GEMM_TILE_INL_H_
#else
#define UPIPE_KERNELS_CPU_GEMM_TILE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

// Rows of C held in registers: kTileRows x 2 accumulators, two vectors of B, one element of A.
#if HWY_TARGET <= HWY_AVX3
constexpr int kTileRows = 8;
#elif HWY_TARGET == HWY_AVX2
constexpr int kTileRows = 6;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;
constexpr int64_t kPanel = kTileVectors * static_cast<int64_t>(kLanes);  // columns of a full tile

// How a tile leaves the registers.
enum class Into {
  kStore,         // C = AB
  kAdd,           // C += AB
  kScaleThenAdd,  // C = C * factor[column] + AB
};
// Where A's element (row, depth) lies.
enum class ReadA {
  kByRow,     // a[row * stride + depth]
  kByColumn,  // a[depth * stride + row]
};

struct TileOperands {
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  int64_t depth;
  const float* factor = nullptr;  // kScaleThenAdd only
  ComingRows* coming = nullptr;   // asked for on the way, a step for each kTileRows rows
};

template <int kRows, int kVectors, ReadA kReadA, Into kInto>
HWY_INLINE void Tile(const TileOperands& t) {
  const F32 d;
  VecF32 sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::Zero(d);
  }
  const float* b = t.b;
  const float* a = t.a;
  const int64_t a_stride = t.a_stride, b_stride = t.b_stride;
  for (int64_t k = 0; k < t.depth; ++k) {
    VecF32 columns[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) columns[j] = hn::LoadU(d, b + j * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const VecF32 row = hn::Set(d, kReadA == ReadA::kByRow ? a[i * a_stride] : a[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = hn::MulAdd(row, columns[j], sum[i][j]);
    }
    b += b_stride;
    a += kReadA == ReadA::kByRow ? 1 : a_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      float* c = t.c + i * t.c_stride + j * static_cast<int64_t>(kLanes);
      if constexpr (kInto == Into::kAdd) sum[i][j] = hn::Add(hn::LoadU(d, c), sum[i][j]);
      if constexpr (kInto == Into::kScaleThenAdd) {
        sum[i][j] = hn::MulAdd(hn::LoadU(d, c), hn::LoadU(d, t.factor + j * kLanes), sum[i][j]);
      }
      hn::StoreU(sum[i][j], d, c);
    }
  }
}

// The last `rows` < kTileRows rows.
template <int kVectors, ReadA kReadA, Into kInto, int kRows = kTileRows - 1>
HWY_INLINE void TileRest(const TileOperands& t, int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      Tile<kRows, kVectors, kReadA, kInto>(t);
    } else {
      TileRest<kVectors, kReadA, kInto, kRows - 1>(t, rows);
    }
  }
}

// `rows` rows and kVectors vectors of columns.
template <int kVectors, ReadA kReadA, Into kInto>
HWY_NOINLINE void MultiplyPanel(TileOperands t, int64_t rows) {
  const int64_t a_step = kReadA == ReadA::kByRow ? kTileRows * t.a_stride : kTileRows;
  for (; rows >= kTileRows; rows -= kTileRows) {
    if (t.coming != nullptr) t.coming->PrefetchStep();
    Tile<kTileRows, kVectors, kReadA, kInto>(t);
    t.a += a_step;
    t.c += kTileRows * t.c_stride;
  }
  TileRest<kVectors, kReadA, kInto>(t, rows);
}

// C [rows, columns] with B and C stored to whole vectors of columns.
template <ReadA kReadA, Into kInto>
HWY_INLINE void Multiply(TileOperands t, int64_t rows, int64_t columns) {
  for (; columns > static_cast<int64_t>(kLanes); columns -= kPanel) {
    MultiplyPanel<kTileVectors, kReadA, kInto>(t, rows);
    t.b += kPanel;
    t.c += kPanel;
  }
  if (columns > 0) MultiplyPanel<1, kReadA, kInto>(t, rows);
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
