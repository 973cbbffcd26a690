// The planner's promise: what a rank takes is what its dry run said, to the byte, by tag, at the
// peak and in the arena. The real devices get an arena of exactly the planned size, so one byte
// more would fail by itself.
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

// Trains and evaluates on real devices, and compares every rank's allocator with the plan.
void ExpectDryEqualsReal(const v1::JobSpec& spec, int64_t steps) {
  const auto plan = MakePlan(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const Sequence sequence =
      MakeSequence(spec.train().context(), plan->padded_context(), spec.model().vocab_size(), 1);
  const bool evaluates = plan->spec().train().eval_sequences() > 0;
  const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    const auto host = sequence.Slice(rank.step.tokens(), rank.rank);
    for (int64_t step = 1; step <= steps; ++step) {
      UPIPE_RETURN_IF_ERROR(rank.step.AnyRank(false).status());
      UPIPE_RETURN_IF_ERROR(rank.step.Run(step, host).status());
      if (evaluates) UPIPE_RETURN_IF_ERROR(rank.step.Evaluate(step, host).status());
    }
    const v1::MemoryUsage measured = train::ToMessage(rank.context.device().allocator().stats());
    EXPECT_EQ(measured.DebugString(), plan->ranks(rank.rank).memory().DebugString())
        << "rank " << rank.rank;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

struct Shape {
  const char* name;
  SmallJob job;
  std::optional<int64_t> eval_sequences = {};
  int threads = 1;
};

class DryEqualsReal : public ::testing::TestWithParam<Shape> {};

TEST_P(DryEqualsReal, ToTheByte) {
  v1::JobSpec spec = MakeSpec(GetParam().job);
  if (GetParam().eval_sequences)
    spec.mutable_train()->set_eval_sequences(*GetParam().eval_sequences);
  spec.mutable_parallel()->set_threads_per_rank(GetParam().threads);
  ExpectDryEqualsReal(spec, 2);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, DryEqualsReal,
    ::testing::Values(
        Shape{"heads28_on_8_ranks",
              {.ranks = 8, .num_heads = 28, .num_kv_heads = 4, .context = 50}},
        Shape{"heads28_on_8_ranks_u3",
              {.ranks = 8, .heads_per_rank = 3, .num_heads = 28, .num_kv_heads = 4, .context = 50}},
        Shape{"one_kv_head", {.ranks = 4, .heads_per_rank = 2, .num_heads = 8, .num_kv_heads = 1}},
        Shape{"fewer_kv_heads_than_ranks", {.ranks = 4, .num_heads = 8, .num_kv_heads = 2}},
        Shape{"kv_heads_not_divisible_by_ranks",
              {.ranks = 4, .heads_per_rank = 3, .num_heads = 12, .num_kv_heads = 6, .context = 31}},
        Shape{"ranks_without_heads", {.ranks = 5, .num_heads = 3, .num_kv_heads = 3}},
        Shape{"tokens_not_divisible_by_tile",
              {.ranks = 2, .num_heads = 2, .num_kv_heads = 1, .context = 1301}},
        Shape{"context_shorter_than_ranks", {.ranks = 4, .context = 3}},
        Shape{"tied_embeddings", {.ranks = 3, .vocab_size = 211, .tie_embeddings = true}},
        Shape{"one_rank_one_token", {.ranks = 1, .heads_per_rank = 4, .context = 1}},
        Shape{"ulysses", {.ranks = 4, .num_heads = 8, .ulysses = true}},
        Shape{"no_evaluation", {.ranks = 2}, 0},
        Shape{"two_threads", {.ranks = 2, .context = 700}, 1, 2},
        Shape{"reference_backend", {.ranks = 2, .backend = "reference"}}),
    [](const auto& info) { return info.param.name; });

TEST(DryEqualsReal, TheDemo) {
  const auto spec = ReadJobSpecFile(
      absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/deploy/samples/demo.yaml"), {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ExpectDryEqualsReal(*spec, 1);
}

}  // namespace
}  // namespace upipe::testing
