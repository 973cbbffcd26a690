// Rows of a storage-typed tensor as the fp32 rows that attention's Highway tiles read: copied,
// since rows in place may be bf16, end within a vector, or lie so far apart that they share the
// ways of a cache. Included once per target.
#if defined(UPIPE_KERNELS_CPU_ATTENTION_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef UPIPE_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#undef UPIPE_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#else
#define UPIPE_KERNELS_CPU_ATTENTION_ROWS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/api/tensor_view.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

struct Rows {
  const float* data;
  int64_t stride;
};

// Row (i, j) of `view`, fp32 or bf16, as fp32.
HWY_INLINE void LoadRow(const TensorView& view, int64_t i, int64_t j, float* out) {
  WithStorageType(view.dtype, [&](auto storage) HWY_ATTR {
    const auto* in = static_cast<const decltype(storage)*>(view.At(i, j));
    ForEachVector(view.shape[2], [&](size_t e, size_t count) HWY_ATTR {
      StoreFirst(LoadFirst(in + e, count), out + e, count);
    });
  });
}

// Floats between rows of `width` floats: rows a power of two apart would share the ways of a cache.
constexpr int64_t RowStride(int64_t width) { return width + 16; }

// Rows [first, first + count) of index `head` of dim 1, in `copy`; zeros from head_dim to width.
HWY_INLINE Rows LoadRows(const TensorView& view, int64_t first, int64_t head, int64_t count,
                         int64_t width, float* copy) {
  const int64_t head_dim = view.shape[2], stride = RowStride(width);
  for (int64_t i = 0; i < count; ++i) {
    LoadRow(view, first + i, head, copy + i * stride);
    std::fill_n(copy + i * stride + head_dim, width - head_dim, 0.0f);
  }
  return {copy, stride};
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
