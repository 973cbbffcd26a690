// Warm-up, half a cosine, minimum.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/optim/optimizer.h"

namespace upipe::optim {
namespace {

v1::OptimizerSpec Spec(double peak, double low, int64_t warmup) {
  v1::OptimizerSpec spec;
  spec.set_learning_rate(peak);
  spec.set_min_learning_rate(low);
  spec.set_warmup_steps(warmup);
  return spec;
}

TEST(LearningRate, RisesLinearlyToThePeak) {
  const auto spec = Spec(0.8, 0.1, 8);
  for (int64_t step = 1; step <= 8; ++step) {
    EXPECT_DOUBLE_EQ(LearningRate(spec, step, 100), 0.1 * static_cast<double>(step));
  }
}

TEST(LearningRate, FallsAlongHalfACosineToTheMinimum) {
  const auto spec = Spec(1.0, 0.2, 10);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 10, 110), 1.0);
  EXPECT_NEAR(LearningRate(spec, 35, 110), 0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2,
              1e-12);  // a quarter of the way
  EXPECT_NEAR(LearningRate(spec, 60, 110), 0.6, 1e-12);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 110, 110), 0.2);
  for (int64_t step = 11; step <= 110; ++step) {
    EXPECT_LT(LearningRate(spec, step, 110), LearningRate(spec, step - 1, 110)) << step;
  }
}

TEST(LearningRate, DegenerateSchedules) {
  EXPECT_DOUBLE_EQ(LearningRate(Spec(1, 0.1, 0), 1, 1), 0.1);   // the only step is the last
  EXPECT_DOUBLE_EQ(LearningRate(Spec(1, 0.1, 10), 4, 4), 0.4);  // still warming up at the end
  EXPECT_DOUBLE_EQ(LearningRate(Spec(1, 0.1, 4), 4, 4), 1);
  for (int64_t step = 1; step <= 7; ++step)
    EXPECT_DOUBLE_EQ(LearningRate(Spec(0.5, 0.5, 0), step, 7), 0.5);
  const double early = LearningRate(Spec(1, 0, 0), 1, int64_t{1} << 31);
  EXPECT_TRUE(early > 0.999999 && early <= 1) << early;
}

}  // namespace
}  // namespace upipe::optim
