// Collects the violations of a specification: the ranges every section's rules are written in.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/spec/violation.h"
#include "common/units.h"

namespace upipe {

// RoPE angles are exact below it. With the limits of the sizes of a model, the largest product the
// engine forms (bytes of all layer inputs, 2^30 tokens x 2^16 columns x 2^10 layers x 4) is 2^58.
inline constexpr int64_t kMaxContext = int64_t{1} << 30;

// "2, 4, 8": the divisors of `n` from `first` on.
inline std::string DivisorsOf(int64_t n, int64_t first = 1) {
  std::string divisors;
  for (int64_t i = first; i <= n; ++i) {
    if (n % i == 0) absl::StrAppend(&divisors, divisors.empty() ? "" : ", ", i);
  }
  return divisors;
}

// Each check returns whether it held.
class SpecChecker {
 public:
  bool Fail(absl::string_view field, std::string message) {
    violations_.push_back({std::string(field), std::move(message)});
    return false;
  }

  // For required integers, where 0 and absent look the same.
  bool Required(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    if (value == 0) {
      return Fail(field, absl::StrCat("is required: a whole number from ", FormatCount(min), " to ",
                                      FormatCount(max), "; it is absent or 0"));
    }
    return InRange(field, value, min, max);
  }

  bool InRange(absl::string_view field, int64_t value, int64_t min, int64_t max) {
    if (value >= min && value <= max) return true;
    return Fail(field, absl::StrCat(FormatCount(value), " is outside ", FormatCount(min), " to ",
                                    FormatCount(max)));
  }

  bool Positive(absl::string_view field, double value) {
    if (std::isfinite(value) && value > 0) return true;
    return Fail(field, absl::StrCat(value, " is not a finite number above 0"));
  }

  // As Positive, for what the engine holds in fp32: there it must not become 0 or infinite.
  bool PositiveFloat(absl::string_view field, double value) {
    using Limits = std::numeric_limits<float>;
    if (value >= Limits::min() && value <= Limits::max()) return true;
    return Fail(field, absl::StrCat(value, " is not a number above 0 that fp32 holds (",
                                    Limits::min(), " to ", Limits::max(), ")"));
  }

  // [0, 1), in fp32 too.
  bool Fraction(absl::string_view field, double value) {
    if (value >= 0 && value < 1 && static_cast<float>(value) < 1) return true;
    return Fail(field, absl::StrCat(value, " is outside 0 (included) to 1 (excluded)"));
  }

  std::vector<Violation> Take() { return std::move(violations_); }

 private:
  std::vector<Violation> violations_;
};

}  // namespace upipe
