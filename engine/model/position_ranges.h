// The ranges of positions that a step's loss is reported for: [0, 4K), then each four times as far
// as the one before; the last has no end. What a long-context run is judged by.
#pragma once

#include <cstdint>
#include <limits>

namespace upipe::model {

inline constexpr int64_t kFirstPositionRangeEnd = 4096;
inline constexpr int kNumPositionRanges = 10;  // the last begins at 2^28

// First position after range `range`.
constexpr int64_t PositionRangeEnd(int range) {
  return range + 1 < kNumPositionRanges ? kFirstPositionRangeEnd << (2 * range)
                                        : std::numeric_limits<int64_t>::max();
}
static_assert(PositionRangeEnd(kNumPositionRanges - 2) == int64_t{1} << 28);

// The range a position lies in.
constexpr int PositionRangeOf(int64_t position) {
  int range = 0;
  while (position >= PositionRangeEnd(range)) ++range;
  return range;
}

}  // namespace upipe::model
