#include "benchmarks/support/paired_ratio.h"

#include <cmath>
#include <iterator>

#include "common/check.h"

namespace upipe::bench {

double Abba::ratio() const { return std::sqrt(cost[0] * cost[3] / (cost[1] * cost[2])); }

double StudentQuantile(int degrees_of_freedom) {
  struct Row {
    int degrees;
    double quantile;
  };
  static constexpr Row kTable[] = {{1, 12.706}, {2, 4.303},  {3, 3.182},  {4, 2.776},
                                   {5, 2.571},  {6, 2.447},  {7, 2.365},  {8, 2.306},
                                   {9, 2.262},  {10, 2.228}, {12, 2.179}, {15, 2.131},
                                   {20, 2.086}, {30, 2.042}, {60, 2.000}, {120, 1.980}};
  UPIPE_CHECK(degrees_of_freedom >= 1) << degrees_of_freedom << " degrees of freedom";
  double quantile = kTable[0].quantile;
  for (const Row& row : kTable) {
    if (row.degrees <= degrees_of_freedom) quantile = row.quantile;
  }
  return quantile;
}

RatioEstimate EstimateRatio(const std::vector<double>& ratios) {
  UPIPE_CHECK(!ratios.empty()) << "no pair was measured";
  const auto n = static_cast<double>(ratios.size());
  double mean = 0;
  for (const double ratio : ratios) mean += std::log(ratio) / n;
  RatioEstimate estimate{.ratio = std::exp(mean), .interval = std::nullopt};
  if (ratios.size() == 1) return estimate;
  double squares = 0;
  for (const double ratio : ratios) squares += std::pow(std::log(ratio) - mean, 2);
  const double error = std::sqrt(squares / (n - 1) / n);
  const double reach = StudentQuantile(static_cast<int>(ratios.size()) - 1) * error;
  estimate.interval = {.low = std::exp(mean - reach), .high = std::exp(mean + reach)};
  return estimate;
}

}  // namespace upipe::bench
