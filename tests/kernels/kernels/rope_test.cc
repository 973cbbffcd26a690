#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  const char* name;
  int64_t tokens, heads, head_dim, first_position, gap;
  bool inverse, accumulate, hf_parity, llama3, in_place;
};

RopeConfig ConfigOf(const Case& c) {
  RopeConfig config = {.theta = 500000.0, .hf_parity = c.hf_parity};
  if (c.llama3) config.llama3.emplace();
  return config;
}

RopeParams Call(const Case& c, Memory& memory) {
  std::vector<int64_t> positions(c.tokens);
  for (int64_t t = 0; t < c.tokens; ++t) positions[t] = c.first_position + 7 * t;
  const Memory::Shape shape = {{c.tokens, c.heads, c.head_dim}, c.gap};
  RopeParams p = {.positions = memory.Positions(positions),
                  .config = ConfigOf(c),
                  .inverse = c.inverse,
                  .accumulate = c.accumulate};
  p.dst = c.accumulate || c.in_place ? memory.InOut("dst", shape) : memory.Output("dst", shape);
  p.src = c.in_place ? p.dst : memory.Input(shape);
  return p;
}

class Rope : public ::testing::TestWithParam<Case> {};

TEST_P(Rope, WithinTheBound) {
  ExpectCpuMatchesReference([](Memory& memory) { return Call(GetParam(), memory); });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Rope,
    ::testing::Values(Case{"OneToken", 1, 1, 2, 3, 0, false, false, false, false, false},
                      Case{"Plain", 33, 3, 64, 0, 0, false, false, false, false, false},
                      Case{"OddHalf", 20, 2, 26, 1000, 3, false, false, false, true, false},
                      Case{"Inverse", 20, 2, 80, 5, 0, true, false, false, false, false},
                      Case{"Accumulate", 20, 2, 16, 5, 2, true, true, false, false, false},
                      Case{"InPlace", 20, 2, 128, 5, 0, false, false, false, true, true},
                      Case{"Far", 20, 2, 128, 5'000'000, 0, false, false, false, false, false},
                      Case{"HfParity", 20, 2, 64, 5'000'000, 0, false, false, true, true, false},
                      Case{"Wide", 3, 1, 600, 70'000, 0, false, false, false, false, false},
                      Case{"Empty", 0, 2, 8, 0, 0, false, false, false, false, false}),
    [](const auto& info) { return info.param.name; });

// Turning (1, 0) gives the cosine and the sine themselves.
TEST(Rope, Position5000000IsExact) {
  const int64_t head_dim = 64, half = head_dim / 2;
  for (OpTable* ops : {&Reference(), &Cpu()}) {
    Memory memory(1);
    RopeParams p = {.src = memory.InOut("src", {{1, 1, head_dim}}, 0),
                    .dst = memory.Output("dst", {{1, 1, head_dim}}),
                    .positions = memory.Positions({5'000'000})};
    for (int64_t i = 0; i < half; ++i) SetElement(p.src, 0, 0, i, 1);
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    for (int64_t i = 0; i < half; ++i) {
      const long double angle = 5'000'000.0L / powl(10000.0L, 2.0L * i / head_dim);
      EXPECT_NEAR(GetElement(p.dst, 0, 0, i), static_cast<double>(cosl(angle)), 6.1e-8) << i;
      EXPECT_NEAR(GetElement(p.dst, 0, 0, i + half), static_cast<double>(sinl(angle)), 6.1e-8) << i;
    }
  }
}

// fp32 angles at a far position differ from exact ones by far more than rounding: the switch does
// something.
TEST(Rope, HfParityRoundsTheAngle) {
  Memory exact(1), rounded(1);
  const Case far = {"", 4, 1, 64, 5'000'000, 0, false, false, false, false, false};
  Case parity = far;
  parity.hf_parity = true;
  ASSERT_EQ(RunCall(Reference(), Call(far, exact), exact), absl::OkStatus());
  ASSERT_EQ(RunCall(Reference(), Call(parity, rounded), rounded), absl::OkStatus());
  EXPECT_GT(RelativeError(rounded.Results()[0].values, exact.Results()[0].values), 1e-3);
}

// The rotation is orthogonal: its gradient is the inverse rotation.
TEST(Rope, GradientEqualsFiniteDifferences) {
  Memory memory(2), forward(3);
  const TensorView positions = memory.Positions({3, 1'000'003});
  const TensorView dy = memory.Input({{2, 2, 6}}), dx = memory.Output("dx", {{2, 2, 6}});
  ASSERT_EQ(
      RunCall(Reference(),
              RopeParams{.src = dy, .dst = dx, .positions = positions, .inverse = true}, memory),
      absl::OkStatus());
  const TensorView x = forward.InOut("x", {{2, 2, 6}}), y = forward.Output("y", {{2, 2, 6}});
  ExpectGradient(x, dx, [&] {
    EXPECT_EQ(RunCall(Reference(), RopeParams{.src = x, .dst = y, .positions = positions}, forward),
              absl::OkStatus());
    return WeightedSum(dy, y);
  });
}

}  // namespace
}  // namespace upipe::kernels::testing
