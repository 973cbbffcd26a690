// What attention forward and backward share on the CPU: limits and constants.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace upipe::kernels::cpu {

inline constexpr int64_t kMaxHeadDim = 256;  // what tiles on the stack have room for
inline constexpr float kLog2E = 1.44269504f;
inline constexpr double kLn2 = 0.69314718055994530942;

// InvalidArgument above kMaxHeadDim.
absl::Status CheckHeadDim(int64_t head_dim);

}  // namespace upipe::kernels::cpu
