// What attention forward and backward share on the CPU: limits and constants.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/tensor_view.h"

namespace upipe::kernels::cpu {

inline constexpr int64_t kMaxHeadDim = 256;  // what tiles on the stack have room for
inline constexpr float kLog2E = 1.44269504f;
inline constexpr double kLn2 = 0.69314718055994530942;

// Of one K/V head, in backward.
struct KvHeadSlots {
  int32_t kv = 0;        // in k and v
  int32_t gradient = 0;  // in dk and dv
};

// Rows of one head that a later tile will read: strided rows are beyond the hardware's own
// prefetching, and requests that come many at a time are dropped, so products ask for a few rows at
// each of their steps.
struct ComingRows {
  const char* row = nullptr;
  int64_t stride_bytes = 0;
  int64_t row_bytes = 0;
  int64_t left = 0;
  int64_t per_step = 0;

  ComingRows() = default;
  // Rows [first, first + count) of index `head` of dim 1, asked for in `steps` steps.
  ComingRows(const TensorView& view, int64_t first, int64_t head, int64_t count, int64_t steps)
      : row(static_cast<const char*>(view.At(first, head))),
        stride_bytes(view.stride[0] * SizeOf(view.dtype)),
        row_bytes(view.shape[2] * SizeOf(view.dtype)),
        left(count),
        per_step((count + steps - 1) / steps) {}

  void PrefetchStep() {
    constexpr int64_t kLine = 64;
    for (int64_t i = 0; i < per_step && left > 0; ++i, --left, row += stride_bytes) {
      for (int64_t b = 0; b < row_bytes; b += kLine) __builtin_prefetch(row + b);
    }
  }
};

// InvalidArgument above kMaxHeadDim.
absl::Status CheckHeadDim(int64_t head_dim);

}  // namespace upipe::kernels::cpu
