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
  ExpectMatchesReference([&](Memory& memory) {
    return SwiGluFwdParams{memory.Input({{tokens, width}, gap}, scale),
                           memory.Input({{tokens, width}, gap}),
                           memory.Output("out", {{tokens, width}, gap})};
  });
}

TEST_P(SwiGlu, OutMayAliasGateOrUp) {
  const auto [tokens, width, gap, scale] = GetParam();
  for (const bool gate_is_out : {false, true}) {
    ExpectMatchesReference([&](Memory& memory) {
      const TensorView out = memory.InOut("out", {{tokens, width}, gap}, scale);
      const TensorView other = memory.Input({{tokens, width}, gap}, scale);
      return SwiGluFwdParams{gate_is_out ? out : other, gate_is_out ? other : out, out};
    });
  }
}

TEST_P(SwiGlu, BackwardWithinTheBound) {
  const auto [tokens, width, gap, scale] = GetParam();
  ExpectMatchesReference([&](Memory& memory) {
    return SwiGluBwdParams{memory.InOut("dout", {{tokens, width}, gap}),
                           memory.InOut("gate", {{tokens, width}, gap}, scale),
                           memory.InOut("up", {{tokens, width}, gap})};
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGlu,
                         ::testing::Values(Shape{1, 1, 0, 1}, Shape{0, 8, 0, 1}, Shape{9, 77, 3, 1},
                                           Shape{40, 128, 0, 5}, Shape{10, 33, 1, 100}));

// A gate of 64 or more is its own silu in fp32: every product is exact but for the one rounding.
TEST(SwiGlu, LargeGatesRoundOnce) {
  const auto gates = [](TensorView view, Memory& memory) {
    SetSmallIntegers(view, 60, memory);
    for (int64_t i = 0; i < view.shape[1]; ++i) {
      SetElement(view, 0, i, 0, 127 + GetElement(view, 0, i));
    }
    memory.Seal();
  };
  ExpectEqualsReference([&](Memory& memory) {
    const SwiGluFwdParams p = {memory.Input({{1, 100}}), memory.Input({{1, 100}}),
                               memory.Output("out", {{1, 100}})};
    gates(p.gate, memory);
    SetSmallIntegers(p.up, 127, memory);
    return p;
  });
  ExpectEqualsReference([&](Memory& memory) {
    const SwiGluBwdParams p = {memory.InOut("dout", {{1, 100}}), memory.InOut("gate", {{1, 100}}),
                               memory.InOut("up", {{1, 100}})};
    gates(p.gate, memory);
    SetSmallIntegers(p.up, 127, memory);
    SetSmallIntegers(p.dout, 127, memory);
    return p;
  });
}

// The product that the backward leaves is the forward's, bit for bit.
TEST(SwiGlu, BackwardLeavesTheForwardsOut) {
  ForEachStorage([](DType storage) {
    ForEachVariant([&](const std::string&) {
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(1, storage);
        const Memory::Shape shape = {{7, 90}, 2};
        const SwiGluBwdParams p = {memory.InOut("dout", shape), memory.InOut("gate", shape, 3),
                                   memory.InOut("up", shape)};
        const TensorView out = memory.Output("out", shape);
        ASSERT_EQ(RunCall(*ops, SwiGluFwdParams{p.gate, p.up, out}, memory), absl::OkStatus());
        ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
        EXPECT_EQ(memory.Results()[0].values, memory.Results()[3].values);
      }
    });
  });
}

TEST(SwiGlu, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const TensorView gate = forward.InOut("gate", {{4, 5}}), up = forward.InOut("up", {{4, 5}});
  const TensorView out = forward.Output("out", {{4, 5}}), dout = memory.Input({{4, 5}});
  const TensorView product = memory.Output("dout, then out", {{4, 5}});
  const TensorView dgate = memory.Output("dgate", {{4, 5}}), dup = memory.Output("dup", {{4, 5}});
  CopyElements(gate, dgate);
  CopyElements(up, dup);
  CopyElements(dout, product);
  ASSERT_EQ(RunCall(Reference(), SwiGluBwdParams{product, dgate, dup}, memory), absl::OkStatus());
  const auto loss = [&] {
    EXPECT_EQ(RunCall(Reference(), SwiGluFwdParams{gate, up, out}, forward), absl::OkStatus());
    return WeightedSum(dout, out);
  };
  ExpectGradient(gate, dgate, loss);
  ExpectGradient(up, dup, loss);
  loss();
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(GetElement(product, t, i), GetElement(out, t, i));
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
