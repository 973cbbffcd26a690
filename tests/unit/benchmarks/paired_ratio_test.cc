// Intervals of ratios, against values worked out by hand.
#include "benchmarks/support/paired_ratio.h"

#include <gtest/gtest.h>

#include <cmath>

namespace upipe::bench {
namespace {

TEST(Abba, SteadyDriftCancels) {
  // Every step costs 10 % more than the one before.
  const Abba drifting{.cost = {2, 2 * 1.1, 2 * 1.21, 2 * 1.331}};
  EXPECT_NEAR(drifting.ratio(), 1, 1e-12);
  const Abba apart{.cost = {3, 2 * 1.1, 2 * 1.21, 3 * 1.331}};
  EXPECT_NEAR(apart.ratio(), 1.5, 1e-12);
}

TEST(EstimateRatio, OnePairHasNoInterval) {
  const RatioEstimate estimate = EstimateRatio({1.25});
  EXPECT_DOUBLE_EQ(estimate.ratio, 1.25);
  EXPECT_FALSE(estimate.interval.has_value());
}

TEST(EstimateRatio, StudentsIntervalOverLogarithms) {
  // Logarithms -0.1, 0 and 0.4: mean 0.1, standard deviation sqrt(0.07), standard error
  // sqrt(0.07 / 3), 4.303 of them either way at two degrees of freedom.
  const RatioEstimate estimate = EstimateRatio({std::exp(-0.1), 1, std::exp(0.4)});
  EXPECT_NEAR(estimate.ratio, std::exp(0.1), 1e-12);
  ASSERT_TRUE(estimate.interval.has_value());
  EXPECT_NEAR(std::log(estimate.interval->low), 0.1 - 4.303 * std::sqrt(0.07 / 3), 1e-12);
  EXPECT_NEAR(std::log(estimate.interval->high), 0.1 + 4.303 * std::sqrt(0.07 / 3), 1e-12);
}

TEST(EstimateRatio, EqualPairsLeaveNoDoubt) {
  const RatioEstimate estimate = EstimateRatio({0.5, 0.5, 0.5, 0.5, 0.5});
  EXPECT_NEAR(estimate.ratio, 0.5, 1e-12);
  EXPECT_NEAR(estimate.interval->low, 0.5, 1e-12);
  EXPECT_NEAR(estimate.interval->high, 0.5, 1e-12);
}

TEST(StudentQuantile, NeverNarrowerThanTheTruth) {
  EXPECT_EQ(StudentQuantile(1), 12.706);
  EXPECT_EQ(StudentQuantile(4), 2.776);
  EXPECT_EQ(StudentQuantile(14), StudentQuantile(12));
  EXPECT_EQ(StudentQuantile(1000), 1.980);
}

}  // namespace
}  // namespace upipe::bench
