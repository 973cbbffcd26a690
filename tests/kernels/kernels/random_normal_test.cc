#include "gtest/gtest.h"
#include "kernels/api/counter_normal.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

TEST(RandomNormal, EqualsReference) {
  for (const int64_t n : {0, 1, 1000}) {
    ExpectEqualsReference([&](Memory& memory) {
      return RandomNormalParams{memory.Output("dst", {{n}}, kW), 7, 3, int64_t{1} << 40, 0.02f};
    });
  }
}

std::vector<double> Draw(uint64_t seed, uint64_t tensor, int64_t first, int64_t n) {
  Memory memory(1);
  EXPECT_EQ(
      RunCall(Tested(), RandomNormalParams{memory.Output("dst", {{n}}), seed, tensor, first, 1},
              memory),
      absl::OkStatus());
  return memory.Results()[0].values;
}

TEST(RandomNormal, AShardHoldsItsPartOfTheWhole) {
  const std::vector<double> whole = Draw(1, 2, 0, 100);
  EXPECT_EQ(Draw(1, 2, 30, 20), std::vector<double>(whole.begin() + 30, whole.begin() + 50));
}

TEST(RandomNormal, SeedTensorAndIndexAllMatter) {
  const std::vector<double> first = Draw(1, 2, 0, 10);
  EXPECT_NE(first, Draw(2, 2, 0, 10));
  EXPECT_NE(first, Draw(1, 3, 0, 10));
  EXPECT_NE(first, Draw(1, 2, 10, 10));
}

TEST(RandomNormal, HasTheMomentsOfANormal) {
  const int64_t n = 200'000;
  double sum = 0, square = 0, fourth = 0;
  for (const double x : Draw(11, 5, 0, n)) {
    sum += x;
    square += x * x;
    fourth += x * x * x * x;
  }
  // Six standard errors of each mean: sqrt(1 / n), sqrt(2 / n), sqrt(96 / n).
  EXPECT_NEAR(sum / n, 0, 0.0135);
  EXPECT_NEAR(square / n, 1, 0.019);
  EXPECT_NEAR(fourth / n, 3, 0.132);
}

// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
TEST(RandomNormal, PhiloxKnownAnswers) {
  using Four = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Four{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Four{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Four{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

}  // namespace
}  // namespace upipe::kernels::testing
