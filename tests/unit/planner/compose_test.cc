// Composed is run: every number of a rank's dry run, for every method and policy of the space, at
// layer counts with and without a middle, for every rank of a group of ranks that are alike.
#include "planner/compose.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "engine/parallel/head_schedule.h"
#include "engine/parallel/mesh.h"
#include "planner/plan.h"
#include "planner/recording.h"
#include "tests/invariance/engine/method_space.h"

namespace upipe::planner {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using upipe::testing::MakeSpec;
using upipe::testing::MethodCase;
using upipe::testing::NamedCase;
using upipe::testing::SmallJob;

// What DryRunRank needs of a plan.
v1::RunPlan Unpriced(const v1::JobSpec& spec) {
  v1::RunPlan plan;
  *plan.mutable_spec() = WithDefaults(spec);
  const v1::JobSpec& full = plan.spec();
  const parallel::Mesh mesh = parallel::Mesh::From(full.parallel());
  const bool upipe = full.parallel().method() == v1::METHOD_UPIPE;
  const auto schedule = parallel::MakeHeadChunkSchedule(
      {.num_heads = full.model().num_heads(),
       .num_kv_heads = full.model().num_kv_heads(),
       .ulysses_ranks = mesh.ulysses_ranks,
       .heads_per_rank =
           upipe ? full.parallel().heads_per_stage() / mesh.ulysses_ranks
                 : parallel::UlyssesHeadsPerRank(full.model().num_heads(), mesh.ulysses_ranks),
       .ring_ranks = mesh.ring_ranks,
       .query_chunks = full.memory().query_chunks(),
       .overlap = full.memory().overlap()});
  UPIPE_CHECK(schedule.ok()) << schedule.status();
  *plan.mutable_schedule() = *schedule;
  plan.set_schedule_hash(parallel::HashOf(plan.schedule()));
  return plan;
}

// Composes and runs all ranks of each group, or its first and last.
void ExpectComposedIsRun(const v1::RunPlan& plan, bool every_rank,
                         const std::string& attention_kernel = "own") {
  for (std::vector<int> group : AlikeRanks(plan)) {
    if (!every_rank && group.size() > 2) group = {group.front(), group.back()};
    const auto composed = ComposeAlike(plan, group, attention_kernel);
    ASSERT_TRUE(composed.ok()) << composed.status();
    for (size_t i = 0; i < group.size(); ++i) {
      const auto run = DryRunRank(plan, group[i], attention_kernel);
      ASSERT_TRUE(run.ok()) << run.status();
      SCOPED_TRACE(absl::StrCat("rank ", group[i], ", composed from ", group[0]));
      EXPECT_EQ((*composed)[i].rank.DebugString(), run->rank.DebugString());
      EXPECT_TRUE((*composed)[i].counts == run->counts);
    }
  }
}

TEST(Compose, EveryPairOfTheMethodSpace) {
  int64_t number = 0;
  for (const NamedCase& c : upipe::testing::PairwiseCases()) {
    // One to five segments, the last of any length.
    SmallJob job = c.test.job;
    job.num_layers =
        std::max<int64_t>(job.stride, number % 5 * job.stride + 1 + number % job.stride);
    if (number % 7 == 0) job.accumulation += 4;
    SCOPED_TRACE(absl::StrCat(c.name, ", ", job.num_layers, " layers"));
    ExpectComposedIsRun(Unpriced(MakeSpec(job)), /*every_rank=*/number % 8 == 0);
    ++number;
  }
}

TEST(Compose, EveryMethodWithEveryPolicy) {
  const auto& dimensions = upipe::testing::Dimensions();
  const auto policies = std::find_if(dimensions.begin(), dimensions.end(),
                                     [](const auto& d) { return d.name == "policy"; });
  ASSERT_NE(policies, dimensions.end());
  for (const NamedCase& c : upipe::testing::OneCasePerMethod()) {
    for (const auto& policy : policies->choices) {
      MethodCase point = c.test;
      policy.apply(point);
      point.job.num_layers = 3 * point.job.stride + 1;
      point.job.bf16 = true;
      if (!ValidateJobSpec(MakeSpec(point.job)).empty()) continue;
      SCOPED_TRACE(absl::StrCat(c.name, ", ", policy.name));
      ExpectComposedIsRun(Unpriced(MakeSpec(point.job)), /*every_rank=*/false);
      point.job.backend = "cuda";
      ExpectComposedIsRun(Unpriced(MakeSpec(point.job)), /*every_rank=*/false, "cudnn 9.19");
    }
  }
}

constexpr char kLlama[] = R"(name: compose
model: {vocab_size: 96, hidden_size: 64, num_layers: 6, num_heads: 32, num_kv_heads: 8, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 8, method: upipe, heads_per_stage: 8}
train: {context: 8192, steps: 3}
)";

v1::RunPlan Plan(const std::vector<std::string>& overrides) {
  const auto spec = ParseJobSpecYaml(kLlama, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  auto plan = MakeRunPlan(*spec, {.check_data = false});
  UPIPE_CHECK(plan.ok()) << plan.status();
  return *std::move(plan);
}

// Tokens of several tiles, whose loss is summed in several ranges of positions.
TEST(Compose, LongSequences) {
  for (const std::vector<std::string>& job : std::vector<std::vector<std::string>>{
           {"train.context=70K", "memory.checkpoint_stride=1", "train.gradient_accumulation=6"},
           {"train.context=20000", "model.num_heads=28", "model.num_kv_heads=4"},
           {"train.context=20K", "parallel.ring_ranks=4", "memory.overlap=on"},
           {"train.context=20K", "memory.query_chunks=5", "memory.layer_inputs=host"},
           {"train.context=9999", "parallel.fsdp_ranks=2", "parallel.dp_ranks=2",
            "parallel.heads_per_stage=2", "train.dtype=bf16"},
           {"train.context=5K", "parallel.ranks_per_node=2", "model.num_heads=10",
            "model.num_kv_heads=5"}}) {
    SCOPED_TRACE(job[0] + " " + job[1]);
    const v1::RunPlan plan = Plan(job);
    ExpectComposedIsRun(plan, /*every_rank=*/true);
    for (const v1::RankPlan& rank : plan.ranks()) {
      const auto run = DryRunRank(plan, rank.rank());
      ASSERT_TRUE(run.ok()) << run.status();
      EXPECT_EQ(rank.DebugString(), run->rank.DebugString());
    }
  }
}

TEST(AlikeRanks, DifferByHeadsRunsOfTokensAndLossRanges) {
  EXPECT_THAT(AlikeRanks(Plan({"train.context=4K"})),
              ElementsAre(ElementsAre(0, 1, 2, 3, 4, 5, 6, 7)));
  // 4096 and 65536 cut the first rank's tokens, 1048576 the second's, 4194304 the seventh's.
  v1::RunPlan longer = Plan({});
  longer.mutable_spec()->mutable_train()->set_context(int64_t{5} << 20);
  EXPECT_THAT(AlikeRanks(longer), ElementsAre(ElementsAre(0), ElementsAre(1),
                                              ElementsAre(2, 3, 4, 5, 7), ElementsAre(6)));
  EXPECT_THAT(AlikeRanks(Plan({"train.context=4K", "model.num_heads=28", "model.num_kv_heads=28"})),
              ElementsAre(ElementsAre(0, 2, 4, 6), ElementsAre(1, 3, 5, 7)));
  // The last ring rank's two half-blocks are neighbours.
  EXPECT_THAT(AlikeRanks(Plan({"train.context=4K", "parallel.ring_ranks=4"})),
              ElementsAre(ElementsAre(0, 1, 2, 3, 4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(AlikeRanks(Plan({"train.context=4K", "parallel.dp_ranks=2", "parallel.fsdp_ranks=2",
                               "parallel.heads_per_stage=2"})),
              ElementsAre(ElementsAre(0, 1, 2, 3, 4, 5, 6, 7)));
}

TEST(Play, RefusesFragmentsThatAreNotOfOneRun) {
  const v1::RunPlan plan = Plan({"train.context=64"});
  StreamNames streams;
  const auto recording = Record(plan, 0, "own", 1, streams);
  ASSERT_TRUE(recording.ok()) << recording.status();
  std::vector<Played> fragments;
  for (const Fragment& fragment : recording->fragments) fragments.push_back({&fragment});
  const auto whole = Play(fragments, plan, 0, streams);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->rank.DebugString(), recording->result.rank.DebugString());
  EXPECT_TRUE(whole->counts == recording->result.counts);
  const auto forward = std::find_if(fragments.begin(), fragments.end(), [](const Played& p) {
    return p.fragment->pass == StepPass::kForward;
  });
  ASSERT_NE(forward, fragments.end());
  fragments.erase(forward);
  const absl::Status status = Play(fragments, plan, 0, streams).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("a release of "));
}

}  // namespace
}  // namespace upipe::planner
