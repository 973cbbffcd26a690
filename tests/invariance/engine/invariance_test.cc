// Topology and method must not change the mathematics: loss and every gradient at (ranks 1, 2, 4,
// 8) x every legal u x several head shapes against the single-rank reference, held to the bound:
// three times the error that a plain fp32 run on one rank makes against the wide-accumulation
// reference, plus half an epsilon.
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

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;
};

struct Outcome {
  double loss = 0;
  Tensors gradients;
};

absl::StatusOr<Outcome> Gradients(const testing::SmallJob& job) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, testing::MakePlan(testing::MakeSpec(job)));
  const testing::Sequence sequence =
      testing::MakeSequence(job.context, plan.padded_context(), job.vocab_size, 7);
  Outcome outcome;
  Collector gradients;
  UPIPE_RETURN_IF_ERROR(testing::RunRanks({.plan = plan}, [&](Rank rank) -> absl::Status {
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

class Invariance : public ::testing::TestWithParam<Heads> {};

TEST_P(Invariance, EveryRankCountAndStageWidth) {
  testing::SmallJob job{.num_heads = GetParam().num_heads,
                        .num_kv_heads = GetParam().num_kv_heads,
                        .head_dim = GetParam().head_dim,
                        .context = 45};  // divides by no rank count above 1
  job.backend = "reference";
  const auto reference = Gradients(job);
  ASSERT_TRUE(reference.ok()) << reference.status();
  job.backend = "cpu";
  const auto single = Gradients(job);
  ASSERT_TRUE(single.ok()) << single.status();
  const double half_epsilon = std::numeric_limits<float>::epsilon() / 2;
  for (int ranks : {1, 2, 4, 8}) {
    const int64_t widest = parallel::UlyssesHeadsPerRank(job.num_heads, ranks);
    for (int64_t u = 1; u <= widest; ++u) {
      job.ranks = ranks;
      job.heads_per_rank = u;
      job.ulysses = false;
      const auto outcome = Gradients(job);
      const std::string where = absl::StrCat(ranks, " ranks, u ", u);
      ASSERT_TRUE(outcome.ok()) << where << ": " << outcome.status();
      EXPECT_NEAR(outcome->loss, reference->loss, 1e-6 * reference->loss) << where;
      ASSERT_EQ(outcome->gradients.size(), reference->gradients.size());
      for (const auto& [name, gradient] : reference->gradients) {
        const double naive = RelativeError(single->gradients.at(name), gradient);
        EXPECT_LE(RelativeError(outcome->gradients.at(name), gradient), 3 * naive + half_epsilon)
            << where << ": " << name << ", plain fp32 error " << naive;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(HeadShapes, Invariance,
                         ::testing::Values(Heads{8, 2, 8},   // K < C at 4 and 8 ranks
                                           Heads{6, 3, 6},   // K and H not divisible by 4 or 8
                                           Heads{7, 1, 10},  // multi-query, odd heads
                                           Heads{5, 5, 4},   // multi-head, H < C at 8 ranks
                                           Heads{12, 4, 16},
                                           Heads{14, 2, 8}),  // groups of 7 straddle stages
                         [](const auto& info) {
                           return absl::StrCat("H", info.param.num_heads, "_K",
                                               info.param.num_kv_heads, "_D", info.param.head_dim);
                         });

// Ulysses is the one-stage point of the same schedule: the same bits as upipe at u = ceil(H / C).
TEST(Methods, UlyssesIsTheOneStagePoint) {
  testing::SmallJob job{
      .ranks = 4, .heads_per_rank = 2, .num_heads = 8, .num_kv_heads = 2, .context = 40};
  const auto upipe = Gradients(job);
  job.ulysses = true;
  const auto ulysses = Gradients(job);
  ASSERT_TRUE(upipe.ok() && ulysses.ok());
  EXPECT_EQ(upipe->loss, ulysses->loss);
  EXPECT_EQ(upipe->gradients, ulysses->gradients);
}

}  // namespace
}  // namespace upipe
