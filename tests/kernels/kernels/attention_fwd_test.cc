#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

class AttentionFwd : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionFwd, WithinTheBoundOfReference) {
  ExpectMatchesReference([](Memory& memory) { return ForwardCall(GetParam(), memory); }, 2);
}

// Probabilities of huge scores are 0 and 1, which the naive kernel does not round to bf16 and one
// relative to a running maximum does: where o is wide, the bound needs scores of a few hundred.
AttentionCase WithModestScores(AttentionCase c) {
  c.score_scale = std::min(c.score_scale, 300.0);
  return c;
}

TEST_P(AttentionFwd, WideOutputWithinTheBound) {
  AttentionCase c = WithModestScores(GetParam());
  c.wide_output = true;
  ExpectMatchesReferenceIn(
      DType::kBFloat16, [&](Memory& memory) { return ForwardCall(c, memory); }, 2);
}

TEST_P(AttentionFwd, MergeWithinTheBound) {
  for (const DType storage : {DType::kFloat32, DType::kBFloat16}) {
    AttentionCase c = storage == DType::kFloat32 ? GetParam() : WithModestScores(GetParam());
    c.merge = true;
    ExpectMatchesReferenceIn(
        storage, [&](Memory& memory) { return ForwardCall(c, memory); }, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, AttentionFwd, ::testing::ValuesIn(AttentionCases()),
                         [](const auto& info) { return info.param.name; });

TEST(AttentionFwd, AQueryWithoutKeysGetsZeroAndMinusInfinity) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const AttentionFwdParams p = ForwardCall({.queries = {0, 40}, .keys = {30, 70}}, memory);
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    for (int64_t t = 0; t < 30; ++t) {
      EXPECT_EQ(GetElement(p.lse, 0, t), -INFINITY);
      for (int64_t e = 0; e < 16; ++e) EXPECT_EQ(GetElement(p.o, t, 0, e), 0.0);
    }
    EXPECT_TRUE(std::isfinite(GetElement(p.lse, 0, 30)));
  }
}

TEST(AttentionFwd, EqualScoresAverageTheVisibleValues) {
  for (OpTable* ops : {&Reference(), &Tested()}) {
    Memory memory(1);
    const AttentionFwdParams p =
        ForwardCall({.queries = {0, 100}, .keys = {0, 100}, .score_scale = 0}, memory);
    ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
    double sum = 0;
    for (int64_t t = 0; t < 100; ++t) {
      sum += GetElement(p.v, t, 0, 3);
      EXPECT_NEAR(GetElement(p.o, t, 0, 3), sum / (t + 1), 1e-6);
      EXPECT_NEAR(GetElement(p.lse, 0, t), std::log(t + 1), 1e-6);
    }
  }
}

// Equal scores of 2^n keys: o is an exact mean but for its one rounding.
TEST(AttentionFwd, MeansOfPowersOfTwoRoundOnce) {
  ForEachVariant([](const std::string&) {
    std::vector<std::vector<double>> means;
    for (OpTable* ops : {&Reference(), &Tested()}) {
      Memory memory(1, DType::kBFloat16);
      const AttentionFwdParams p =
          ForwardCall({.queries = {0, 128}, .keys = {0, 128}, .score_scale = 0}, memory);
      SetSmallIntegers(p.v, 255, memory);
      ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
      std::vector<double>& values = means.emplace_back();
      for (int64_t t : {0, 1, 3, 7, 15, 31, 63, 127}) {
        for (int64_t e = 0; e < 16; ++e) values.push_back(GetElement(p.o, t, 0, e));
      }
    }
    EXPECT_EQ(means[0], means[1]);
  });
}

// A NaN must reach the loss: it may not vanish in a maximum.
TEST(AttentionFwd, NanReachesTheOutputOfQueriesThatSeeIt) {
  ForEachStorage([](DType storage) {
    ForEachVariant([&](const std::string&) {
      Memory memory(1, storage);
      const AttentionFwdParams p = ForwardCall({.queries = {0, 100}, .keys = {0, 100}}, memory);
      SetElement(p.k, 10, 0, 0, std::nan(""));
      memory.Seal();
      ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
      EXPECT_TRUE(std::isfinite(GetElement(p.o, 9, 0, 0)));
      EXPECT_TRUE(std::isnan(GetElement(p.o, 10, 0, 0)));
      EXPECT_TRUE(std::isnan(GetElement(p.o, 99, 0, 0)));
    });
  });
}

// Threads take whole query blocks, so their number changes nothing at all.
TEST(AttentionFwd, ThreadsDoNotChangeABit) {
  ForEachStorage([](DType storage) {
    std::vector<Memory::Result> first;
    for (int threads : {1, 2, 3}) {
      Memory memory(7, storage);
      const AttentionFwdParams p =
          ForwardCall({.queries = {0, 700}, .keys = {0, 700}, .kv_slot = {0, 0}}, memory);
      ASSERT_EQ(RunCall(Tested(), p, memory, threads), absl::OkStatus());
      if (threads == 1) first = memory.Results();
      EXPECT_EQ(memory.Results()[0].values, first[0].values);
      EXPECT_EQ(memory.Results()[1].values, first[1].values);
    }
  });
}

}  // namespace
}  // namespace upipe::kernels::testing
