// Topology and method must not change the mathematics: loss and every gradient at (ranks 1, 2, 4,
// 8) x every legal u x several head shapes, in fp32 and in bf16, against a single rank of the
// reference backend in fp32, held to the bound: three times the error that a plain run of the same
// precision on one rank makes, plus half an epsilon of the storage type.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/parallel/head_schedule.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

using testing::Collector;
using testing::Rank;
using testing::RelativeError;
using testing::Tensors;

struct Shape {
  int64_t num_heads, num_kv_heads, head_dim;
  bool qk_norm = false, qkv_bias = false;
  bool bf16 = false;
};

struct Outcome {
  double loss = 0;
  Tensors gradients;
};

absl::StatusOr<Outcome> Gradients(const testing::SmallJob& job) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, testing::MakePlan(testing::MakeSpec(job)));
  const testing::Sequence sequence =
      testing::MakeSequence(job.context, plan.padded_context(), job.vocab_size, 7);
  const Tensors weights = testing::RandomWeights(plan, 11);
  Outcome outcome;
  Collector gradients;
  UPIPE_RETURN_IF_ERROR(testing::RunRanks({.plan = plan}, [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(testing::SetWeights(rank, weights));
    UPIPE_ASSIGN_OR_RETURN(auto result,
                           rank.step.Run(1, sequence.Slice(rank.step.tokens(), rank.rank)));
    if (rank.rank == 0) outcome.loss = result.loss;
    if (result.valid_tokens != static_cast<double>(job.context)) {
      return absl::InternalError(
          absl::StrCat(result.valid_tokens, " valid tokens of ", job.context));
    }
    return gradients.Add(rank, rank.step.parameters().gradients());
  }));
  outcome.gradients = gradients.tensors();
  return outcome;
}

// Of any gradient on one rank; PyTorch's largest on models like these is a third of it
// (tests/golden/make).
constexpr double kLargestBf16Error = 0.1;

class Invariance : public ::testing::TestWithParam<Shape> {};

TEST_P(Invariance, EveryRankCountAndStageWidth) {
  testing::SmallJob job{.num_heads = GetParam().num_heads,
                        .num_kv_heads = GetParam().num_kv_heads,
                        .head_dim = GetParam().head_dim,
                        .context = 45,  // divides by no rank count above 1
                        .qk_norm = GetParam().qk_norm,
                        .qkv_bias = GetParam().qkv_bias};
  job.backend = "reference";
  const auto reference = Gradients(job);
  ASSERT_TRUE(reference.ok()) << reference.status();
  job.backend = "cpu";
  job.bf16 = GetParam().bf16;
  const auto single = Gradients(job);
  ASSERT_TRUE(single.ok()) << single.status();
  const double half_epsilon =
      job.bf16 ? upipe::testing::kHalfEpsilonOfBf16 : std::numeric_limits<float>::epsilon() / 2;
  const double loss_error = std::abs(single->loss - reference->loss) / reference->loss;
  const double loss_bound = job.bf16 ? 3 * loss_error + half_epsilon : 1e-6;
  for (int ranks : {1, 2, 4, 8}) {
    const int64_t widest = parallel::UlyssesHeadsPerRank(job.num_heads, ranks);
    for (int64_t u = 1; u <= widest; ++u) {
      job.ranks = ranks;
      job.heads_per_rank = u;
      const auto outcome = Gradients(job);
      const std::string where = absl::StrCat(ranks, " ranks, u ", u);
      ASSERT_TRUE(outcome.ok()) << where << ": " << outcome.status();
      EXPECT_NEAR(outcome->loss, reference->loss, loss_bound * reference->loss) << where;
      ASSERT_EQ(outcome->gradients.size(), reference->gradients.size());
      for (const auto& [name, gradient] : reference->gradients) {
        const double naive = RelativeError(single->gradients.at(name), gradient);
        EXPECT_LE(RelativeError(outcome->gradients.at(name), gradient), 3 * naive + half_epsilon)
            << where << ": " << name << ", plain error " << naive;
        if (!job.bf16) continue;
        EXPECT_LE(naive, kLargestBf16Error) << name;
        // Only fp32 sums differ, before they are rounded: less than the rounding itself.
        EXPECT_LE(RelativeError(outcome->gradients.at(name), single->gradients.at(name)),
                  naive + half_epsilon)
            << where << ": " << name << " against one rank";
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

// Ulysses is the one-stage point of the same schedule: the same bits as upipe at u = ceil(H / C).
TEST(Methods, UlyssesIsTheOneStagePoint) {
  for (const bool bf16 : {false, true}) {
    testing::SmallJob job{.ranks = 4,
                          .heads_per_rank = 2,
                          .num_heads = 8,
                          .num_kv_heads = 2,
                          .context = 40,
                          .qk_norm = bf16,
                          .qkv_bias = !bf16,
                          .bf16 = bf16};
    const auto upipe = Gradients(job);
    job.ulysses = true;
    const auto ulysses = Gradients(job);
    ASSERT_TRUE(upipe.ok() && ulysses.ok());
    EXPECT_EQ(upipe->loss, ulysses->loss);
    EXPECT_EQ(upipe->gradients, ulysses->gradients);
  }
}

}  // namespace
}  // namespace upipe
