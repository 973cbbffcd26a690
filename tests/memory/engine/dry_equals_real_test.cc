// The planner's promise: what a rank takes is what its plan says, to the byte, by tag, at the peak
// and in the arena, of the device and of the host, and so is what it sends to each peer. Plans are
// composed of dry runs (planner/compose.h), and models are deep enough for that to matter. The real
// devices get pools of exactly the planned size, so one byte more would fail by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <ostream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "engine/train/rank_run.h"
#include "tests/invariance/engine/method_space.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

void ExpectTraffic(const comm::CommStats& before, const comm::CommStats& after,
                   const v1::RankPlan& planned) {
  ASSERT_EQ(static_cast<int>(after.bytes_sent_to_peer.size()), planned.bytes_sent_to_peer_size());
  for (int peer = 0; peer < planned.bytes_sent_to_peer_size(); ++peer) {
    EXPECT_EQ(after.bytes_sent_to_peer[peer] - before.bytes_sent_to_peer[peer],
              planned.bytes_sent_to_peer(peer))
        << "from rank " << planned.rank() << " to " << peer;
  }
}

// Trains and evaluates on real devices, and compares every rank's pools and traffic with the plan.
// `sequences` are those of a step.
void ExpectDryEqualsReal(const v1::JobSpec& spec, absl::Span<const Sequence> sequences,
                         int64_t steps) {
  const auto plan = MakePlan(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const bool evaluates = plan->spec().train().eval_sequences() > 0;
  const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    const v1::RankPlan& planned = plan->ranks(rank.rank);
    for (int64_t step = 1; step <= steps; ++step) {
      const comm::CommStats before = rank.context.comm().stats();
      UPIPE_RETURN_IF_ERROR(rank.step.Vote({}).status());
      UPIPE_RETURN_IF_ERROR(RunStep(rank, step, sequences).status());
      ExpectTraffic(before, rank.context.comm().stats(), planned);
      if (evaluates) UPIPE_RETURN_IF_ERROR(Evaluate(rank, step, sequences).status());
    }
    kernels::Device& device = rank.context.device();
    EXPECT_EQ(train::ToMessage(device.allocator().stats()).DebugString(),
              planned.memory().DebugString())
        << "device of rank " << rank.rank;
    EXPECT_EQ(train::ToMessage(device.host_allocator().stats()).DebugString(),
              planned.host_memory().DebugString())
        << "host of rank " << rank.rank;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

void ExpectDryEqualsReal(const v1::JobSpec& spec, int64_t steps) {
  ExpectDryEqualsReal(spec, {MakeSequence(spec, 1)}, steps);
}
void ExpectDryEqualsReal(const MethodCase& c) {
  ExpectDryEqualsReal(MakeSpec(c.job), SequencesOf(c), 1);
}

struct Shape {
  const char* name;
  SmallJob job;
  std::optional<int64_t> eval_sequences = {};
  int threads = 1;
};
void PrintTo(const Shape& shape, std::ostream* out) { *out << shape.name; }

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
        Shape{"ulysses", {.ranks = 4, .num_heads = 8, .method = v1::METHOD_ULYSSES}},
        Shape{"no_evaluation", {.ranks = 2}, 0},
        Shape{"two_threads", {.ranks = 2, .context = 700}, 1, 2},
        Shape{"reference_backend", {.ranks = 2, .backend = "reference"}}),
    [](const auto& info) { return info.param.name; });

// ---- the space of methods and policies

TEST(DryEqualsReal, EveryMethodWithEveryPolicyAtSeveralLengths) {
  const std::vector<Dimension>& dimensions = Dimensions();
  const auto policies = std::find_if(dimensions.begin(), dimensions.end(),
                                     [](const auto& d) { return d.name == "policy"; });
  ASSERT_NE(policies, dimensions.end());
  constexpr int64_t kLengths[] = {75, 1, 301};
  int64_t number = 0;
  for (const NamedCase& c : OneCasePerMethod()) {
    for (const Choice& policy : policies->choices) {
      MethodCase point = c.test;
      policy.apply(point);
      // Of one segment, or of four with a short one.
      point.job.num_layers = number % 2 == 0 ? point.job.stride : 3 * point.job.stride + 1;
      point.job.context = kLengths[number % std::size(kLengths)];
      point.job.overlap = number % 4 == 1;
      point.job.bf16 = number / 2 % 2 == 0;
      ++number;
      if (!ValidateJobSpec(MakeSpec(point.job)).empty()) continue;
      SCOPED_TRACE(absl::StrCat(c.name, ", ", policy.name, ", ", point.job.context, " tokens"));
      ExpectDryEqualsReal(point);
    }
  }
}

// Masks, documents and data axes too: some of the rows that hold every pair.
TEST(DryEqualsReal, RowsOfTheMethodSpace) {
  const std::vector<NamedCase>& rows = PairwiseCases();
  for (size_t number = 0; number < rows.size(); number += 16) {
    MethodCase deeper = rows[number].test;
    deeper.job.num_layers = 4 * deeper.job.stride - 1;
    SCOPED_TRACE(rows[number].name);
    ExpectDryEqualsReal(deeper);
  }
}

// The copy of a checkpoint is in the plan, where the optimizer lives on the host too.
TEST(DryEqualsReal, WithCheckpoints) {
  for (const auto place : {v1::PLACE_DEVICE, v1::PLACE_HOST}) {
    for (const int dp_ranks : {1, 2}) {
      SCOPED_TRACE(absl::StrCat("optimizer ", place, ", dp ", dp_ranks));
      v1::JobSpec spec = MakeSpec({.ranks = 4, .dp_ranks = dp_ranks, .optimizer = place});
      spec.mutable_checkpoint()->set_path("/checkpoints");
      const auto plan = MakePlan(spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      std::vector<Sequence> sequences;
      for (int i = 0; i < dp_ranks; ++i) sequences.push_back(MakeSequence(spec, 1 + i));
      const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(rank.step.Vote({}).status());
        UPIPE_RETURN_IF_ERROR(RunStep(rank, 1, sequences).status());
        UPIPE_RETURN_IF_ERROR(Evaluate(rank, 1, sequences).status());
        UPIPE_RETURN_IF_ERROR(rank.step.TakeSnapshot().status());
        kernels::Device& device = rank.context.device();
        const v1::RankPlan& planned = plan->ranks(rank.rank);
        EXPECT_EQ(train::ToMessage(device.allocator().stats()).DebugString(),
                  planned.memory().DebugString());
        EXPECT_EQ(train::ToMessage(device.host_allocator().stats()).DebugString(),
                  planned.host_memory().DebugString());
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(DryEqualsReal, TheDemo) {
  const auto spec = ReadJobSpecFile(
      absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/deploy/samples/demo.yaml"), {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ExpectDryEqualsReal(*spec, 1);
}

}  // namespace
}  // namespace upipe::testing
