#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  int64_t tokens, d, gap;
  double scale;
};

class RmsNorm : public ::testing::TestWithParam<Shape> {};

TEST_P(RmsNorm, ForwardWithinTheBound) {
  const auto [tokens, d, gap, scale] = GetParam();
  ExpectCpuMatchesReference([&](Memory& memory) {
    return RmsNormFwdParams{memory.Input({{tokens, d}, gap}, scale), memory.Input({{d}}),
                            memory.Output("y", {{tokens, d}, gap})};
  });
}

TEST_P(RmsNorm, BackwardWithinTheBound) {
  const auto [tokens, d, gap, scale] = GetParam();
  ExpectCpuMatchesReference([&](Memory& memory) {
    return RmsNormBwdParams{memory.Input({{tokens, d}, gap}, scale), memory.Input({{d}}),
                            memory.Input({{tokens, d}, gap}),
                            memory.InOut("dx", {{tokens, d}, gap}), memory.InOut("dweight", {{d}})};
  });
}

TEST_P(RmsNorm, DxMayAliasDy) {
  const auto [tokens, d, gap, scale] = GetParam();
  ExpectCpuMatchesReference([&](Memory& memory) {
    const TensorView gradient = memory.InOut("dy, then dx", {{tokens, d}, gap});
    return RmsNormBwdParams{memory.Input({{tokens, d}, gap}, scale), memory.Input({{d}}), gradient,
                            gradient, memory.InOut("dweight", {{d}})};
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNorm,
                         ::testing::Values(Shape{1, 8, 0, 1}, Shape{5, 1, 0, 1}, Shape{0, 8, 0, 1},
                                           Shape{300, 67, 3, 1}, Shape{33, 200, 0, 1e-4},
                                           Shape{20, 128, 0, 1e6}));

TEST(RmsNorm, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const TensorView x = forward.InOut("x", {{5, 7}}), weight = forward.InOut("weight", {{7}});
  const TensorView y = forward.Output("y", {{5, 7}});
  const RmsNormBwdParams p = {x, weight, memory.Input({{5, 7}}), memory.InOut("dx", {{5, 7}}, 0),
                              memory.InOut("dweight", {{7}}, 0)};
  ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
  const auto loss = [&] {
    EXPECT_EQ(RunCall(Reference(), RmsNormFwdParams{x, weight, y}, forward), absl::OkStatus());
    return WeightedSum(p.dy, y);
  };
  ExpectGradient(x, p.dx, loss);
  ExpectGradient(weight, p.dweight, loss);
}

}  // namespace
}  // namespace upipe::kernels::testing
