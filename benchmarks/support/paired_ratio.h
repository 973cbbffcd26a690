// How much more one program costs than another, from pairs that were measured side by side: the
// geometric mean of the pairs' ratios and the interval that holds the true one with a confidence of
// 95 % (Student's t over the logarithms).
#pragma once

#include <array>
#include <optional>
#include <vector>

namespace upipe::bench {

// Four runs in the order A B B A: a steady drift of the machine adds as much to either side.
struct Abba {
  std::array<double, 4> cost = {};  // A, B, B, A; all above zero
  // Of A to B: geometric means.
  double ratio() const;
};

struct RatioEstimate {
  double ratio = 1;
  // None from a single pair.
  struct Interval {
    double low = 0;
    double high = 0;
  };
  std::optional<Interval> interval;
};
// Ratios must not be empty, and above zero.
RatioEstimate EstimateRatio(const std::vector<double>& ratios);

// The 97.5 % quantile of Student's distribution; the table's next smaller degree where it has none,
// which makes intervals wider, never narrower.
double StudentQuantile(int degrees_of_freedom);

}  // namespace upipe::bench
