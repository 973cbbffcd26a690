#include "common/chart/scale.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/units.h"

namespace upipe::chart {
namespace {

std::vector<double> Multiples(Range range, double step) {
  std::vector<double> ticks;
  const double first = std::ceil(range.low / step - 1e-9);
  const double last = std::floor(range.high / step + 1e-9);
  for (double i = first; i <= last; ++i) ticks.push_back(i * step);
  return ticks;
}

// The smallest of 1, 2, 5 times a power of ten that gives no more than `wanted` steps.
double RoundStep(Range range, int wanted) {
  const double rough = (range.high - range.low) / wanted;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

}  // namespace

double Scale::operator()(double value) const {
  const double share = (value - from.low) / (from.high - from.low);
  return to.low + share * (to.high - to.low);
}

std::vector<double> RoundTicks(Range range, int wanted) {
  UPIPE_CHECK(range.high > range.low && wanted > 0) << range.low << " to " << range.high;
  return Multiples(range, RoundStep(range, wanted));
}

std::vector<double> ByteTicks(Range range, int wanted) {
  UPIPE_CHECK(range.high > range.low && wanted > 0) << range.low << " to " << range.high;
  const double rough = (range.high - range.low) / wanted;
  return Multiples(range, std::exp2(std::ceil(std::log2(rough) - 1e-9)));
}

std::vector<double> WholeTicks(Range range, int wanted) {
  UPIPE_CHECK(range.high > range.low && wanted > 0) << range.low << " to " << range.high;
  return Multiples(range, std::max(1.0, RoundStep(range, wanted)));
}

std::string PlainNumber(double value) {
  std::string text = absl::StrFormat("%.4f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string ShortNumber(double value) {
  if (value >= 1e6) return absl::StrCat(PlainNumber(std::round(value / 1e4) / 100), "M");
  if (value >= 1e3) return absl::StrCat(PlainNumber(std::round(value / 100) / 10), "K");
  return PlainNumber(std::round(value * 10) / 10);
}

std::string Bytes(double value) { return FormatBytes(std::llround(value)); }

}  // namespace upipe::chart
