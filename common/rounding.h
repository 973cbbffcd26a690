// Whole-number division and rounding upward, of numbers that are not negative.
#pragma once

#include <cstdint>

namespace upipe {

constexpr int64_t CeilDiv(int64_t n, int64_t divisor) { return (n + divisor - 1) / divisor; }
constexpr int64_t RoundUp(int64_t n, int64_t multiple) { return CeilDiv(n, multiple) * multiple; }

}  // namespace upipe
