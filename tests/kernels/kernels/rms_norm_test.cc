#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  std::vector<int64_t> dims;  // [T, d] or [T, heads, d]
  int64_t gap;
  double scale;
  int64_t d() const { return dims.back(); }
};

class RmsNorm : public ::testing::TestWithParam<Case> {
 protected:
  static Memory::Shape Shape() { return {GetParam().dims, GetParam().gap}; }
  static TensorView X(Memory& memory) { return memory.Input(Shape(), GetParam().scale); }
  static TensorView Weight(Memory& memory) { return memory.Input({{GetParam().d()}}); }
  static TensorView DWeight(Memory& memory) {
    return memory.InOut("dweight", {{GetParam().d()}}, 1, kW);
  }
};

TEST_P(RmsNorm, ForwardWithinTheBound) {
  ExpectMatchesReference([](Memory& memory) {
    return RmsNormFwdParams{X(memory), Weight(memory), memory.Output("y", Shape())};
  });
}

TEST_P(RmsNorm, YMayAliasX) {
  ExpectMatchesReference([](Memory& memory) {
    const TensorView x = memory.InOut("x, then y", Shape(), GetParam().scale);
    return RmsNormFwdParams{x, Weight(memory), x};
  });
}

TEST_P(RmsNorm, AddsTheResidual) {
  for (const bool wide : {false, true}) {
    for (const bool in_place : {false, true}) {
      ExpectMatchesReference(
          [&](Memory& memory) {
            RmsNormFwdParams p = {.weight = Weight(memory),
                                  .y = memory.Output("y", Shape()),
                                  .residual = memory.Input(Shape(), 0.3 * GetParam().scale,
                                                           wide ? kW : memory.storage())};
            p.sum = in_place ? memory.InOut("x, then sum", Shape(), GetParam().scale)
                             : memory.Output("sum", Shape());
            p.x = in_place ? p.sum : X(memory);
            return p;
          },
          2);
    }
  }
}

TEST_P(RmsNorm, BackwardWithinTheBound) {
  for (const bool wide : {false, true}) {
    for (const bool accumulate : {false, true}) {
      ExpectMatchesReference(
          [&](Memory& memory) {
            return RmsNormBwdParams{
                .x = X(memory),
                .weight = Weight(memory),
                .dy = memory.Input(Shape(), 1, wide ? kW : memory.storage()),
                .dx = accumulate ? memory.InOut("dx", Shape()) : memory.Output("dx", Shape()),
                .dweight = DWeight(memory),
                .accumulate = accumulate};
          },
          2);
    }
  }
}

TEST_P(RmsNorm, DxMayAliasXOrDy) {
  for (const bool x_is_dx : {false, true}) {
    ExpectMatchesReference([&](Memory& memory) {
      const TensorView dx = memory.InOut("dx", Shape(), x_is_dx ? GetParam().scale : 1);
      return RmsNormBwdParams{.x = x_is_dx ? dx : X(memory),
                              .weight = Weight(memory),
                              .dy = x_is_dx ? memory.Input(Shape()) : dx,
                              .dx = dx,
                              .dweight = DWeight(memory),
                              .accumulate = false};
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, RmsNorm,
                         ::testing::Values(Case{{1, 8}, 0, 1}, Case{{5, 1}, 0, 1},
                                           Case{{0, 8}, 0, 1}, Case{{300, 67}, 3, 1},
                                           Case{{33, 200}, 0, 1e-4}, Case{{20, 128}, 0, 1e6},
                                           Case{{17, 3, 64}, 0, 1}, Case{{50, 2, 19}, 5, 1},
                                           Case{{4, 0, 8}, 0, 1}));

// The heads of [T, heads, d] may lie apart, as those of a packed q, k, v do.
TEST(RmsNorm, HeadsOfAWiderRow) {
  ExpectMatchesReference([](Memory& memory) {
    TensorView x = memory.InOut("qkv", {{9, 6, 16}});
    x.data = x.At(0, 2);
    x.shape[1] = 3;
    return RmsNormFwdParams{x, memory.Input({{16}}), x};
  });
}

// Eight squares that sum to 8 * 4^2: 1 / rms is exactly 1/4, so y has only its one rounding, and
// many ties.
TEST(RmsNorm, RoundsOnceToNearestEven) {
  for (const bool wide : {false, true}) {
    ExpectEqualsReference([&](Memory& memory) {
      RmsNormFwdParams p = {.x = memory.Input({{40, 8}}),
                            .weight = memory.Input({{8}}),
                            .y = memory.Output("y", {{40, 8}}),
                            .residual = memory.Input({{40, 8}}, 1, wide ? kW : memory.storage()),
                            .sum = memory.Output("sum", {{40, 8}}),
                            .eps = 0};
      SetSmallIntegers(p.weight, 127, memory);
      const double h[] = {10, 5, -1, 1, 1, 0, 0, 0};
      for (int64_t t = 0; t < 40; ++t) {
        for (int64_t i = 0; i < 8; ++i) {
          const double x = static_cast<double>(t % 5);
          SetElement(p.x, t, i, 0, x);
          SetElement(p.residual, t, i, 0, h[(i + t) % 8] - x);
        }
      }
      memory.Seal();
      return p;
    });
  }
}

// The sum of x and residual is rounded once, and y and the mean square are of what was rounded: 257
// is a tie that goes down to 256 in bf16, 259 one that goes up to 260.
TEST(RmsNorm, YIsOfTheRoundedSum) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1, DType::kBFloat16);
    RmsNormFwdParams p = {.x = memory.Input({{2, 2}}),
                          .weight = memory.Input({{2}}),
                          .y = memory.Output("y", {{2, 2}}),
                          .residual = memory.Input({{2, 2}}, 1, kW),
                          .sum = memory.Output("sum", {{2, 2}}),
                          .eps = 0};
    for (int64_t i = 0; i < 2; ++i) {
      SetElement(p.weight, i, 0, 0, 1);
      for (int64_t t = 0; t < 2; ++t) SetElement(p.x, t, i, 0, i == 0 ? 256 : 0);
      SetElement(p.residual, 0, i, 0, i == 0 ? 1 : 257);
      SetElement(p.residual, 1, i, 0, i == 0 ? 3 : 259);
    }
    memory.Seal();
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    const std::vector<Memory::Result> results = memory.Results();
    EXPECT_EQ(results[0].values, (std::vector<double>{1, 1, 1, 1}));
    EXPECT_EQ(results[1].values, (std::vector<double>{256, 256, 260, 260}));
  }
}

TEST(RmsNorm, GradientEqualsFiniteDifferences) {
  for (const std::vector<int64_t>& dims : {std::vector<int64_t>{5, 7}, {3, 2, 5}}) {
    const int64_t d = dims.back();
    Memory memory(2), forward(3);
    const TensorView x = forward.InOut("x", {dims}), weight = forward.InOut("weight", {{d}});
    const TensorView y = forward.Output("y", {dims});
    const RmsNormBwdParams p = {x, weight, memory.Input({dims}), memory.InOut("dx", {dims}, 0),
                                memory.InOut("dweight", {{d}}, 0)};
    ASSERT_EQ(RunCall(Reference(), p, memory), absl::OkStatus());
    const auto loss = [&] {
      EXPECT_EQ(RunCall(Reference(), RmsNormFwdParams{x, weight, y}, forward), absl::OkStatus());
      return WeightedSum(p.dy, y);
    };
    ExpectGradient(x, p.dx, loss);
    ExpectGradient(weight, p.dweight, loss);
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
