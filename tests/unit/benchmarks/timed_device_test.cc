// Timing a step changes nothing about it, and what is counted is what the plan's dry run counts.
#include "benchmarks/step/timed_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/train/rank_run.h"
#include "planner/plan.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::bench {
namespace {

// Loss and norm of the last of three steps.
struct Outcome {
  double loss = 0;
  double grad_norm = 0;
};

Outcome RunSteps(kernels::Device& device, const v1::RunPlan& plan) {
  const auto comms = comm::InprocGroup::Create(1, {});
  const auto streams = engine::RankStreams::Create(device, 0);
  const engine::RankContext context = testing::MakeContext(plan, device, streams, *comms[0]);
  const auto step = train::TrainStep::Create(context, plan);
  EXPECT_TRUE(step.ok()) << step.status();
  const testing::Sequence sequence = testing::MakeSequence(plan.spec(), 5);
  Outcome outcome;
  for (int number = 1; number <= 3; ++number) {
    const auto result = testing::RunStep({0, context, **step}, number, sequence);
    EXPECT_TRUE(result.ok()) << result.status();
    outcome = {result->loss, result->grad_norm};
  }
  return outcome;
}

class TimedDeviceTest : public ::testing::TestWithParam<bool> {
 protected:
  const v1::RunPlan plan_ = *testing::MakePlan(testing::MakeSpec({.ranks = 1, .bf16 = GetParam()}));
};

TEST_P(TimedDeviceTest, LeavesTheStepAsItIs) {
  const auto bare = *train::CreateRankDevice(plan_, 0);
  const auto behind = *train::CreateRankDevice(plan_, 0);
  TimedDevice timed(*behind, Clock::kWall);
  const Outcome expected = RunSteps(*bare, plan_);
  const Outcome outcome = RunSteps(timed, plan_);
  EXPECT_EQ(outcome.loss, expected.loss);
  EXPECT_EQ(outcome.grad_norm, expected.grad_norm);
}

TEST_P(TimedDeviceTest, CountsWhatTheDryRunCounts) {
  const auto device = *train::CreateRankDevice(plan_, 0);
  TimedDevice timed(*device, Clock::kWall);
  const auto comms = comm::InprocGroup::Create(1, {});
  const auto streams = engine::RankStreams::Create(timed, 0);
  const engine::RankContext context = testing::MakeContext(plan_, timed, streams, *comms[0]);
  const auto step = *train::TrainStep::Create(context, plan_);
  const testing::Sequence sequence = testing::MakeSequence(plan_.spec(), 5);
  ASSERT_TRUE(context.stream().Synchronize().ok());
  timed.profile().Take();
  const double start = Seconds(Clock::kWall);
  ASSERT_TRUE(step->Vote({}).ok());
  ASSERT_TRUE(testing::RunStep({0, context, *step}, 1, sequence).ok());
  const double wall = Seconds(Clock::kWall) - start;
  std::map<std::string, OpTime> by_op;
  double in_compute = 0;
  for (const auto& [key, time] : timed.profile().Take()) {
    by_op[key.op].Add(time);
    if (key.stream == "compute0") in_compute += time.seconds;
    EXPECT_EQ(key.op == "matmul", !key.shape.empty()) << key.op;
  }
  EXPECT_GT(in_compute, 0);
  EXPECT_LE(in_compute, wall);
  by_op.erase("copy or collective");

  const auto dry = *planner::DryRunRank(plan_, 0);
  const auto counted = dry.counts.ops().by_op();
  ASSERT_EQ(by_op.size(), counted.size());
  for (const auto& [op, count] : counted) {
    EXPECT_EQ(by_op[op].calls, count.calls) << op;
    EXPECT_DOUBLE_EQ(by_op[op].cost.flops, count.cost.flops) << op;
    EXPECT_DOUBLE_EQ(by_op[op].cost.bytes_read, count.cost.bytes_read) << op;
  }
  EXPECT_TRUE(timed.profile().Take().empty());
}

INSTANTIATE_TEST_SUITE_P(Dtypes, TimedDeviceTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "bf16" : "fp32"; });

}  // namespace
}  // namespace upipe::bench
