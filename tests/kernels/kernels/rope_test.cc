#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/finite_difference.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

struct Case {
  const char* name;
  int64_t tokens, heads, head_dim, first_position = 0, gap = 0;
  bool inverse = false, accumulate = false, in_place = false, wide = false;
  RopeConfig config = {.theta = 500000.0};
};

RopeParams Call(const Case& c, Memory& memory) {
  std::vector<int64_t> positions(c.tokens);
  for (int64_t t = 0; t < c.tokens; ++t) positions[t] = c.first_position + 7 * t;
  const Memory::Shape shape = {{c.tokens, c.heads, c.head_dim}, c.gap};
  const DType dtype = c.wide ? kW : memory.storage();
  RopeParams p = {.positions = memory.Positions(positions),
                  .config = c.config,
                  .inverse = c.inverse,
                  .accumulate = c.accumulate};
  p.dst = c.accumulate || c.in_place ? memory.InOut("dst", shape, 1, dtype)
                                     : memory.Output("dst", shape, dtype);
  p.src = c.in_place ? p.dst : memory.Input(shape);
  return p;
}

RopeConfig Scaled(RopeConfig::Scaling scaling, bool hf_parity = false) {
  return {.theta = 500000.0, .scaling = scaling, .hf_parity = hf_parity};
}

constexpr RopeConfig::YarnScaling kYarn = {
    .factor = 4, .original_context = 32768, .attention_factor = 1.1386294361119891};

class Rope : public ::testing::TestWithParam<Case> {};

TEST_P(Rope, WithinTheBound) {
  ExpectMatchesReference([](Memory& memory) { return Call(GetParam(), memory); });
}

INSTANTIATE_TEST_SUITE_P(
    Cases, Rope,
    ::testing::Values(Case{"OneToken", 1, 1, 2, 3}, Case{"Plain", 33, 3, 64},
                      Case{"OddHalf", 20, 2, 26, 1000, 3},
                      Case{.name = "Inverse",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 80,
                           .first_position = 5,
                           .inverse = true},
                      Case{.name = "Accumulate",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 16,
                           .first_position = 5,
                           .gap = 2,
                           .inverse = true,
                           .accumulate = true},
                      Case{.name = "InPlace",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 128,
                           .first_position = 5,
                           .in_place = true},
                      Case{.name = "Wide",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 64,
                           .first_position = 5,
                           .wide = true,
                           .config = Scaled(RopeConfig::Llama3Scaling{})},
                      Case{.name = "WideAccumulate",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 48,
                           .first_position = 5,
                           .gap = 3,
                           .inverse = true,
                           .accumulate = true,
                           .wide = true,
                           .config = Scaled(kYarn)},
                      Case{"Far", 20, 2, 128, 5'000'000},
                      Case{.name = "HfParity",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 64,
                           .first_position = 5'000'000,
                           .config = Scaled(RopeConfig::Llama3Scaling{}, true)},
                      Case{.name = "Linear",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 64,
                           .first_position = 5'000'000,
                           .config = Scaled(RopeConfig::LinearScaling{.factor = 4})},
                      Case{.name = "DynamicNtk",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 64,
                           .first_position = 5'000'000,
                           .config = Scaled(RopeConfig::DynamicNtkScaling{
                               .factor = 2, .original_context = 8192, .context = 1 << 23})},
                      Case{.name = "Yarn",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 128,
                           .first_position = 5'000'000,
                           .config = Scaled(kYarn)},
                      Case{.name = "YarnHfParityInverseInPlace",
                           .tokens = 20,
                           .heads = 2,
                           .head_dim = 128,
                           .first_position = 70'000,
                           .inverse = true,
                           .in_place = true,
                           .config = Scaled(kYarn, true)},
                      Case{"ManyPairs", 3, 1, 600, 70'000}, Case{"Empty", 0, 2, 8}),
    [](const auto& info) { return info.param.name; });

// Turning (1, 0) gives the cosine and the sine themselves.
TEST(Rope, Position5000000IsExact) {
  const int64_t head_dim = 64, half = head_dim / 2;
  for (OpTable* ops : {&Reference(), &Tested()}) {
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

// YaRN multiplies the rotated pair, both ways; at position 0 nothing turns and the product is exact
// but for its one rounding.
TEST(Rope, YarnMagnitudeAtPosition0) {
  for (const bool inverse : {false, true}) {
    for (const bool wide : {false, true}) {
      ExpectEqualsReference([&](Memory& memory) {
        RopeConfig::YarnScaling yarn = kYarn;
        yarn.attention_factor = 1.375;
        RopeParams p = Call({.name = "",
                             .tokens = 1,
                             .heads = 9,
                             .head_dim = 50,
                             .inverse = inverse,
                             .wide = wide,
                             .config = Scaled(yarn)},
                            memory);
        SetSmallIntegers(p.src, 255, memory);
        return p;
      });
    }
  }
  Memory memory(1);
  RopeParams p = Call({.name = "", .tokens = 1, .heads = 1, .head_dim = 4}, memory);
  p.config = Scaled(kYarn);
  for (OpTable* ops : {&Reference(), &Tested()}) {
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    EXPECT_NEAR(GetElement(p.dst, 0, 0, 1), 1.1386294361119891 * GetElement(p.src, 0, 0, 1), 1e-6);
  }
}

// The same bits wherever a token stands: sharding and packing change its neighbours.
TEST(Rope, APositionTurnsTheSameWhereverItStands) {
  const std::vector<int64_t> positions = {5'000'011, 3, 63, 64, 5'000'011, 127, 0, 64, 3};
  const auto n = static_cast<int64_t>(positions.size());
  for (const bool hf_parity : {false, true}) {
    ForEachStorage([&](DType storage) {
      ForEachVariant([&](const std::string&) {
        Memory memory(1, storage);
        RopeParams p = {.src = memory.Input({{n, 2, 90}}),
                        .dst = memory.Output("dst", {{n, 2, 90}}),
                        .positions = memory.Positions(positions),
                        .config = Scaled(kYarn, hf_parity)};
        ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
        const std::vector<double> together = memory.Results()[0].values;
        const RopeParams all = p;
        for (int64_t t = 0; t < n; ++t) {
          p.src = all.src.Rows(t, 1);
          p.dst = all.dst.Rows(t, 1);
          p.positions = all.positions.Rows(t, 1);
          ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
        }
        EXPECT_EQ(memory.Results()[0].values, together);
      });
    });
  }
}

// fp32 angles at a far position differ from exact ones by far more than rounding: the switch does
// something.
TEST(Rope, HfParityRoundsTheAngle) {
  Memory exact(1), rounded(1);
  const Case far = {"", 4, 1, 64, 5'000'000};
  Case parity = far;
  parity.config.hf_parity = true;
  ASSERT_EQ(RunCall(Reference(), Call(far, exact), exact), absl::OkStatus());
  ASSERT_EQ(RunCall(Reference(), Call(parity, rounded), rounded), absl::OkStatus());
  EXPECT_GT(RelativeError(rounded.Results()[0].values, exact.Results()[0].values), 1e-3);
}

// The rotation is orthogonal: its gradient is the inverse rotation, times the same magnitude.
TEST(Rope, GradientEqualsFiniteDifferences) {
  for (const RopeConfig& config : {RopeConfig{}, Scaled(kYarn)}) {
    Memory memory(2), forward(3);
    const TensorView positions = memory.Positions({3, 1'000'003});
    const TensorView dy = memory.Input({{2, 2, 6}}), dx = memory.Output("dx", {{2, 2, 6}});
    const RopeParams backward = {
        .src = dy, .dst = dx, .positions = positions, .config = config, .inverse = true};
    ASSERT_EQ(RunCall(Reference(), backward, memory), absl::OkStatus());
    const TensorView x = forward.InOut("x", {{2, 2, 6}}), y = forward.Output("y", {{2, 2, 6}});
    ExpectGradient(x, dx, [&] {
      const RopeParams p = {.src = x, .dst = y, .positions = positions, .config = config};
      EXPECT_EQ(RunCall(Reference(), p, forward), absl::OkStatus());
      return WeightedSum(dy, y);
    });
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
