#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  double sum_of_squares;
  std::vector<double> counts;  // one per range
  float max_norm;
  double norm, scale;
  int skip;
};

TEST(ClipScale, FollowsTheOneGradientRule) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const Case& c : {Case{16, {2}, 1.0f, 2, 0.5 / (2 + 1e-6), 0}, Case{16, {2}, 8.0f, 2, 0.5, 0},
                        Case{16, {2}, std::numeric_limits<float>::infinity(), 2, 0.5, 0},
                        Case{16, {0, 1.5, 0, 0.5}, 8.0f, 2, 0.5, 0}, Case{0, {4}, 1.0f, 0, 0.25, 0},
                        Case{16, {0}, 1.0f, infinity, 0, 1}, Case{16, {0, 0}, 1.0f, infinity, 0, 1},
                        Case{infinity, {2}, 1.0f, infinity, 0, 1},
                        Case{std::nan(""), {2}, 1.0f, std::nan(""), 0, 1},
                        Case{0, {0}, 1.0f, std::nan(""), 0, 1}}) {
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory memory(1);
      std::vector<double> loss_and_count;
      for (const double count : c.counts) loss_and_count.insert(loss_and_count.end(), {123, count});
      const ClipScaleParams p = {
          .sum_of_squares = memory.Doubles({c.sum_of_squares}),
          .loss_and_count = TensorView::Matrix(memory.Doubles(loss_and_count).data, DType::kFloat64,
                                               static_cast<int64_t>(c.counts.size()), 2),
          .grad_norm = memory.Output("grad_norm", {{1}}),
          .scale = memory.Output("scale", {{1}}),
          .skip = memory.Output("skip", {{1}}, DType::kInt32),
          .max_norm = c.max_norm};
      ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
      if (std::isnan(c.norm)) {
        EXPECT_TRUE(std::isnan(GetElement(p.grad_norm, 0)));
      } else {
        EXPECT_EQ(GetElement(p.grad_norm, 0), c.norm);
      }
      EXPECT_EQ(GetElement(p.scale, 0), static_cast<float>(c.scale));
      EXPECT_EQ(GetElement(p.skip, 0), c.skip);
    }
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
