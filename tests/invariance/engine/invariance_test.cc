// The stage width is only a knob: loss, logits and every gradient at ranks 1, 2, 4, 8 x every legal
// u x many head shapes, in fp32 and in bf16, are those of one rank.
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "engine/parallel/head_schedule.h"
#include "tests/invariance/engine/method_case.h"

namespace upipe::testing {
namespace {

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
  bool qk_norm = false, qkv_bias = false;
  bool bf16 = false;
};

// Of any tensor on one rank, so that the bound says something; PyTorch's largest on models like
// these is a third of it (tests/golden/make).
constexpr double kLargestBf16Error = 0.1;

class Invariance : public ::testing::TestWithParam<Shape> {};

TEST_P(Invariance, EveryRankCountAndStageWidth) {
  SmallJob job{.num_heads = GetParam().num_heads,
               .num_kv_heads = GetParam().num_kv_heads,
               .head_dim = GetParam().head_dim,
               .context = 45,  // divides by no rank count above 1
               .qk_norm = GetParam().qk_norm,
               .qkv_bias = GetParam().qkv_bias,
               .bf16 = GetParam().bf16};
  const std::vector<Sequence> sequences = SequencesOf({.job = job});
  const auto reference = ReferenceOf(job, sequences);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto single = RunOnce(job, sequences);
  ASSERT_TRUE(single.ok()) << single.status();
  for (const auto& [name, plain_error] : (*reference)->plain_errors) {
    if (job.bf16) {
      EXPECT_LE(plain_error, kLargestBf16Error) << name;
    }
  }
  for (int ranks : {1, 2, 4, 8}) {
    const int64_t widest = parallel::UlyssesHeadsPerRank(job.num_heads, ranks);
    for (int64_t u = 1; u <= widest; ++u) {
      SCOPED_TRACE(absl::StrCat(ranks, " ranks, u ", u));
      job.ranks = ranks;
      job.heads_per_rank = u;
      const auto outcome = RunOnce(job, sequences);
      ASSERT_TRUE(outcome.ok()) << outcome.status();
      ExpectWithinBound(*outcome, **reference);
      if (!job.bf16) continue;
      // Only fp32 sums differ, before they are rounded: less than the rounding itself.
      for (const auto& [name, values] : single->tensors) {
        EXPECT_LE(RelativeError(outcome->tensors.at(name), values),
                  (*reference)->plain_errors.at(name) + (*reference)->half_epsilon)
            << name << " against one rank";
      }
    }
  }
}

constexpr Shape kShapes[] = {
    {8, 2, 8},   // K < C at 4 and 8 ranks
    {6, 3, 6},   // K and H not divisible by 4 or 8
    {7, 1, 10},  // multi-query, odd heads
    {5, 5, 4},   // multi-head, H < C at 8 ranks
    {12, 4, 16},
    {14, 2, 8},  // groups of 7 straddle stages
    {.num_heads = 8, .num_kv_heads = 4, .head_dim = 8, .qk_norm = true},
    {.num_heads = 6, .num_kv_heads = 3, .head_dim = 6, .qkv_bias = true},
    {.num_heads = 8, .num_kv_heads = 2, .head_dim = 8, .bf16 = true},
    {.num_heads = 5, .num_kv_heads = 5, .head_dim = 4, .bf16 = true},
    {.num_heads = 14, .num_kv_heads = 2, .head_dim = 8, .bf16 = true},
    {.num_heads = 6, .num_kv_heads = 3, .head_dim = 6, .qk_norm = true, .bf16 = true},
    {.num_heads = 7, .num_kv_heads = 1, .head_dim = 10, .qkv_bias = true, .bf16 = true},
};
INSTANTIATE_TEST_SUITE_P(HeadShapes, Invariance, ::testing::ValuesIn(kShapes),
                         [](const auto& info) {
                           return absl::StrCat(
                               "H", info.param.num_heads, "_K", info.param.num_kv_heads, "_D",
                               info.param.head_dim, info.param.qk_norm ? "_norm" : "",
                               info.param.qkv_bias ? "_bias" : "", info.param.bf16 ? "_bf16" : "");
                         });

}  // namespace
}  // namespace upipe::testing
