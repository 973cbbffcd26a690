#include "tests/kernels/kernels/support/finite_difference.h"

#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {

void ExpectGradient(const TensorView& x, const TensorView& gradient,
                    const std::function<double()>& loss) {
  constexpr double kStep = 0x1p-6;
  constexpr double kTolerance = 1e-3;
  std::vector<double> estimated, given;
  for (int64_t i = 0; i < x.shape[0]; ++i) {
    for (int64_t j = 0; j < x.shape[1]; ++j) {
      for (int64_t k = 0; k < x.shape[2]; ++k) {
        const double before = GetElement(x, i, j, k);
        const auto difference = [&](double step) {
          SetElement(x, i, j, k, before + step);
          const double above = loss(), high = GetElement(x, i, j, k);
          SetElement(x, i, j, k, before - step);
          const double below = loss(), low = GetElement(x, i, j, k);
          return (above - below) / (high - low);
        };
        // Richardson: the error of the step squared cancels.
        estimated.push_back((4 * difference(kStep) - difference(2 * kStep)) / 3);
        SetElement(x, i, j, k, before);
        given.push_back(GetElement(gradient, i, j, k));
      }
    }
  }
  EXPECT_LE(RelativeError(estimated, given), kTolerance);
}

double WeightedSum(const TensorView& a, const TensorView& b) {
  double sum = 0;
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    for (int64_t j = 0; j < a.shape[1]; ++j) {
      for (int64_t k = 0; k < a.shape[2]; ++k)
        sum += GetElement(a, i, j, k) * GetElement(b, i, j, k);
    }
  }
  return sum;
}

}  // namespace upipe::kernels::testing
