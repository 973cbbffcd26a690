// The methods that ./dev bench methods compares: what each one's job file says, that all of them
// train the same, and that a row counts what the plan counts.
#include "benchmarks/methods/contestant.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "common/spec/job_spec.h"
#include "planner/plan.h"

namespace upipe::bench {
namespace {

MethodJob SmallJob() {
  return {.ranks = 4,
          .context = 256,
          .hidden_size = 32,
          .intermediate_size = 48,
          .vocab_size = 61,
          .num_heads = 8,
          .num_kv_heads = 4,
          .head_dim = 16};
}

TEST(AllMethods, EveryPlannedMethodIsThere) {
  std::set<std::string> names;
  std::set<v1::Method> methods;
  for (const MethodCase& method : AllMethods()) {
    EXPECT_TRUE(names.insert(method.name).second) << method.name;
    methods.insert(method.method);
    EXPECT_EQ(&MethodNamed(method.name), &method);
  }
  EXPECT_THAT(methods, ::testing::ElementsAre(v1::METHOD_UPIPE, v1::METHOD_ULYSSES, v1::METHOD_RING,
                                              v1::METHOD_USP, v1::METHOD_FPDT));
}

TEST(AllMethods, AreJobsAtTheMeasuredSizes) {
  for (const MethodCase& method : AllMethods()) {
    for (const int ranks : {4, 8}) {
      const v1::JobSpec spec = method.Spec({.ranks = ranks});
      const auto violations = ValidateJobSpec(spec);
      EXPECT_TRUE(violations.empty()) << method.name << ": " << violations[0].message;
      const v1::JobSpec full = WithDefaults(spec);
      EXPECT_EQ(full.memory().query_chunks(), method.query_chunks) << method.name;
      if (method.method != v1::METHOD_RING) {
        EXPECT_EQ(full.parallel().ring_ranks(), method.ring_ranks) << method.name;
      }
    }
  }
}

TEST(AllMethods, UpipeRunsOneHeadPerRankAndStage) {
  for (const MethodCase& method : AllMethods()) {
    const auto plan = planner::MakeRunPlan(method.Spec(SmallJob()), {.check_data = false});
    ASSERT_TRUE(plan.ok()) << method.name << plan.status();
    const v1::HeadChunkSchedule& schedule = plan->schedule();
    if (method.method == v1::METHOD_UPIPE) {
      EXPECT_EQ(schedule.heads_per_rank(), 1) << method.name;
      EXPECT_EQ(schedule.stages_size(), 8 / schedule.ulysses_ranks()) << method.name;
    } else {
      EXPECT_EQ(schedule.stages_size(), 1) << method.name;
    }
  }
}

class EveryMethod : public ::testing::TestWithParam<bool> {};

TEST_P(EveryMethod, TrainsTheSameAndHoldsItsPlan) {
  MethodJob job = SmallJob();
  job.bf16 = GetParam();
  std::vector<std::unique_ptr<Contestant>> contestants;
  for (const MethodCase& method : AllMethods()) {
    auto made = Contestant::Create(method, job);
    ASSERT_TRUE(made.ok()) << method.name << ": " << made.status();
    ASSERT_TRUE((*made)->Step().ok()) << method.name;
    EXPECT_TRUE((*made)->CheckMemory().ok()) << (*made)->CheckMemory();
    contestants.push_back(*std::move(made));
  }
  EXPECT_TRUE(CheckLosses(contestants, job.bf16).ok()) << CheckLosses(contestants, job.bf16);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, EveryMethod, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "bf16" : "fp32"; });

TEST(CheckLosses, NamesWhoDiffers) {
  std::vector<std::unique_ptr<Contestant>> contestants;
  for (const int64_t vocab_size : {61, 67}) {
    MethodJob job = SmallJob();
    job.vocab_size = vocab_size;
    contestants.push_back(*Contestant::Create(MethodNamed("ring"), job));
  }
  const absl::Status status = CheckLosses(contestants, true);
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("with ring"));
}

TEST(ContestantRow, CountsWhatThePlanCounts) {
  auto contestant = Contestant::Create(MethodNamed("fpdt n=4"), SmallJob());
  ASSERT_TRUE(contestant.ok()) << contestant.status();
  ASSERT_TRUE((*contestant)->Step().ok());
  const auto row = (*contestant)->Row();
  ASSERT_TRUE(row.ok()) << row.status();
  double planned = 0, in_ops = 0, seconds = 0;
  for (const v1::RankPlan& rank : (*contestant)->plan().ranks()) planned += rank.step_flops();
  for (const auto& op : (*row)["ops"]) {
    in_ops += op.value("tflop", 0.0);
    seconds += op["cpu_seconds"].get<double>();
  }
  EXPECT_NEAR(in_ops, 1e-12 * planned, 1e-9 * in_ops);
  EXPECT_DOUBLE_EQ((*row)["executed_tflop"].get<double>(), 1e-12 * planned);
  EXPECT_NEAR(seconds, (*row)["cpu_seconds"]["median"].get<double>(), 1e-6);
  EXPECT_GT((*row)["bytes_to_host"].get<int64_t>(), 0);
  EXPECT_GT((*row)["host_memory"]["peak_bytes"].get<int64_t>(), 0);
}

}  // namespace
}  // namespace upipe::bench
