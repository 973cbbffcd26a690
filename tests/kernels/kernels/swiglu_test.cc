#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Shape {
  int64_t tokens, width, gap;
  double scale;
};

class SwiGlu : public ::testing::TestWithParam<Shape> {};

TEST_P(SwiGlu, ForwardWithinTheBound) {
  const auto [tokens, width, gap, scale] = GetParam();
  ExpectCpuMatchesReference([&](Memory& memory) {
    return SwiGluFwdParams{memory.Input({{tokens, width}, gap}, scale),
                           memory.Input({{tokens, width}, gap}),
                           memory.Output("out", {{tokens, width}, gap})};
  });
}

TEST_P(SwiGlu, OutMayAliasGateOrUp) {
  const auto [tokens, width, gap, scale] = GetParam();
  for (const bool gate_is_out : {false, true}) {
    ExpectCpuMatchesReference([&](Memory& memory) {
      const TensorView out = memory.InOut("out", {{tokens, width}, gap}, scale);
      const TensorView other = memory.Input({{tokens, width}, gap}, scale);
      return SwiGluFwdParams{gate_is_out ? out : other, gate_is_out ? other : out, out};
    });
  }
}

TEST_P(SwiGlu, BackwardWithinTheBound) {
  const auto [tokens, width, gap, scale] = GetParam();
  ExpectCpuMatchesReference([&](Memory& memory) {
    return SwiGluBwdParams{memory.Input({{tokens, width}, gap}),
                           memory.InOut("gate", {{tokens, width}, gap}, scale),
                           memory.InOut("up", {{tokens, width}, gap})};
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGlu,
                         ::testing::Values(Shape{1, 1, 0, 1}, Shape{0, 8, 0, 1}, Shape{9, 77, 3, 1},
                                           Shape{40, 128, 0, 5}, Shape{10, 33, 1, 100}));

TEST(SwiGlu, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const TensorView gate = forward.InOut("gate", {{4, 5}}), up = forward.InOut("up", {{4, 5}});
  const TensorView out = forward.Output("out", {{4, 5}}), dout = memory.Input({{4, 5}});
  const TensorView dgate = memory.Output("dgate", {{4, 5}}), dup = memory.Output("dup", {{4, 5}});
  CopyElements(gate, dgate);
  CopyElements(up, dup);
  ASSERT_EQ(RunCall(Reference(), SwiGluBwdParams{dout, dgate, dup}, memory), absl::OkStatus());
  const auto loss = [&] {
    EXPECT_EQ(RunCall(Reference(), SwiGluFwdParams{gate, up, out}, forward), absl::OkStatus());
    return WeightedSum(dout, out);
  };
  ExpectGradient(gate, dgate, loss);
  ExpectGradient(up, dup, loss);
}

}  // namespace
}  // namespace upipe::kernels::testing
