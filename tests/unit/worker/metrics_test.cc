// The worker's series as a scrape shows them: there from the start, of one attempt at a time, gone
// with it; counters for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <iostream>
#include <limits>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/metrics/names.h"
#include "common/position_page.h"
#include "kernels/api/memory_tag.h"
#include "tests/support/metrics/scrape.h"
#include "worker/runtime/metrics_endpoint.h"

namespace upipe::worker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::Key;
using ::testing::Not;
using ::testing::Pair;

const char* const kLabels = "node=\"n1\",slot=\"0\",worker=\"w1\"";

void AddTag(v1::MemoryUsage& usage, const std::string& name, int64_t bytes, int64_t peak) {
  v1::TagBytes& tag = *usage.add_tags();
  tag.set_tag(name);
  tag.set_bytes(bytes);
  tag.set_peak_bytes(peak);
  tag.set_at_peak_bytes(peak - 1);
}

v1::StartRank StartOf(const std::string& job, int64_t planned_bytes) {
  v1::StartRank start;
  start.mutable_ref()->mutable_fence()->set_job_id(job);
  start.mutable_ref()->mutable_fence()->set_generation(3);
  start.mutable_ref()->set_rank(1);
  for (const char* node : {"n0", "n1", "n1", "n1"}) start.add_node_ids(node);
  v1::RunPlan& plan = *start.mutable_plan();
  plan.set_plan_hash(0xab);
  plan.set_model_flops(8e12);
  plan.set_peak_flops(1e12);
  plan.mutable_budget()->set_device_bytes(5000);
  plan.mutable_budget()->set_host_bytes(9000);
  plan.mutable_spec()->mutable_model()->set_num_layers(4);
  plan.add_ranks();
  v1::RankPlan& rank = *plan.add_ranks();
  rank.mutable_memory()->set_peak_bytes(planned_bytes);
  rank.mutable_memory()->set_attention_peak_bytes(77);
  AddTag(*rank.mutable_memory(), "weights", 0, 88);
  rank.mutable_host_memory()->set_peak_bytes(99);
  plan.add_ranks();
  plan.add_ranks();
  return start;
}

v1::StepReport ReportOf(int64_t step) {
  v1::StepReport report;
  report.set_step(step);
  report.set_loss(2.5);
  report.set_grad_norm(0.5);
  report.set_learning_rate(0.25);
  report.set_tokens(4096);
  report.set_step_seconds(4);
  report.set_comm_seconds(1);
  report.set_data_seconds(0.125);
  report.set_hidden_seconds(0.5);
  report.set_tokens_per_second(1024);
  report.set_held_out_loss(2.75);
  report.mutable_memory()->set_attention_peak_bytes(70);
  report.mutable_memory()->set_arena_bytes(600);
  AddTag(*report.mutable_memory(), "weights", 10, 20);
  for (const auto& [stage, seconds] : {std::pair("attention", 2.0), {"exchange", 0.75}}) {
    v1::StageSeconds& spent = *report.add_stages();
    spent.set_stage(stage);
    spent.set_seconds(seconds);
  }
  v1::CommUse& use = *report.add_comm();
  use.set_operation("ring");
  use.set_bytes_sent(1 << 20);
  use.set_seconds(0.5);
  use.set_calls(6);
  return report;
}

v1::RankPosition PositionOf(StepPass pass, int layer, int64_t step = 1) {
  v1::RankPosition position;
  position.set_pass(upipe::NameOf(pass));
  position.set_layer(layer);
  position.set_step(step);
  return position;
}

class WorkerMetricsTest : public ::testing::Test {
 protected:
  WorkerMetricsTest() {
    auto started = MetricsEndpoint::Start("127.0.0.1:0", {.worker = "w1",
                                                          .node = "n1",
                                                          .num_slots = 2,
                                                          .version = "9.9",
                                                          .backend = "cpu",
                                                          .isa = "AVX2"});
    EXPECT_TRUE(started.ok()) << started.status();
    metrics_ = *std::move(started);
    const WorkerSeries declare{declared_};
  }
  // An endpoint takes two seconds to stop serving: it ends with the process.
  ~WorkerMetricsTest() override {
    static auto& kept = *new std::vector<std::unique_ptr<MetricsEndpoint>>();
    kept.push_back(std::move(metrics_));
  }
  std::string Text() const { return testing::Scrape(metrics_->address()); }
  // Of slot 0; `more` are labels after the slot's by name.
  double ValueOf(const std::string& name, const std::string& labels = kLabels) const {
    const auto series = testing::SeriesOf(Text());
    const auto found = series.find(absl::StrCat(name, "{", labels, "}"));
    EXPECT_NE(found, series.end()) << name << " " << labels;
    return found == series.end() ? std::nan("") : found->second;
  }
  void LiveThroughEverything() {
    metrics_->BeginAttempt(StartOf("job-a", 100));
    metrics_->SetPosition(0, PositionOf(StepPass::kForward, 2), absl::Seconds(7));
    metrics_->Observe(0, ReportOf(1));
    v1::CheckpointRef committed;
    committed.set_step(1);
    metrics_->CountCheckpoint(0, committed);
    metrics_->CountProblem(0);
    metrics_->CountExit(RankOutcome::kKilled);
  }

  std::unique_ptr<MetricsEndpoint> metrics_;
  MetricsRegistry declared_;
};

TEST_F(WorkerMetricsTest, WhatIsNeverAbsentIsThereFromTheStartAndNothingElse) {
  EXPECT_THAT(testing::NamesOf(Text()),
              ElementsAreArray(testing::NeverAbsent(declared_.descriptors())));
  EXPECT_EQ(ValueOf("upipe_stage_seconds_total",
                    "node=\"n1\",slot=\"1\",stage=\"attention\",worker=\"w1\""),
            0);
  EXPECT_EQ(
      ValueOf("upipe_comm_bytes_total", "node=\"n1\",operation=\"ring\",slot=\"1\",worker=\"w1\""),
      0);
  EXPECT_EQ(ValueOf("upipe_rank_exits_total", "node=\"n1\",outcome=\"not_started\",worker=\"w1\""),
            0);
  EXPECT_EQ(ValueOf("upipe_build_info",
                    "backend=\"cpu\",isa=\"AVX2\",node=\"n1\",version=\"9.9\",worker=\"w1\""),
            1);
}

TEST_F(WorkerMetricsTest, EveryDescriptorIsServedAndWellNamed) {
  LiveThroughEverything();
  testing::ExpectServedAndWellNamed(Text(), declared_.descriptors());
}

TEST_F(WorkerMetricsTest, NamesAreThoseOfTheKernels) {
  EXPECT_THAT(kTagNames, ElementsAreArray(kernels::kMemoryTagNames));
}

TEST_F(WorkerMetricsTest, APlanSaysWhatIsToBeHeld) {
  metrics_->BeginAttempt(StartOf("job-a", 100));
  EXPECT_EQ(ValueOf("upipe_attempt_info",
                    "generation=\"3\",job=\"job-a\",node=\"n1\","
                    "plan=\"00000000000000ab\",rank=\"1\",slot=\"0\","
                    "worker=\"w1\""),
            1);
  const std::string device = "node=\"n1\",pool=\"device\",slot=\"0\"";
  const std::string host = "node=\"n1\",pool=\"host\",slot=\"0\"";
  const std::string worker = ",worker=\"w1\"";
  EXPECT_EQ(ValueOf("upipe_memory_planned_bytes", device + worker), 100);
  EXPECT_EQ(ValueOf("upipe_memory_planned_bytes", host + worker), 99);
  EXPECT_EQ(ValueOf("upipe_memory_planned_tag_peak_bytes", device + ",tag=\"weights\"" + worker),
            88);
  EXPECT_EQ(ValueOf("upipe_attention_planned_bytes"), 77);
  EXPECT_EQ(ValueOf("upipe_memory_limit_bytes", device + worker), 5000);
  EXPECT_EQ(ValueOf("upipe_memory_limit_bytes", host + worker), 3000);  // three ranks on its node
  EXPECT_EQ(ValueOf("upipe_step_layers"), 8);
}

TEST_F(WorkerMetricsTest, AStepIsShownAndCounted) {
  metrics_->BeginAttempt(StartOf("job-a", 100));
  metrics_->Observe(0, ReportOf(1));
  v1::StepReport second = ReportOf(2);
  second.set_skipped(true);
  second.clear_held_out_loss();
  metrics_->Observe(0, second);
  EXPECT_EQ(ValueOf("upipe_step"), 2);
  EXPECT_EQ(ValueOf("upipe_steps_total"), 2);
  EXPECT_EQ(ValueOf("upipe_skipped_steps_total"), 1);
  EXPECT_EQ(ValueOf("upipe_tokens_total"), 8192);
  EXPECT_EQ(ValueOf("upipe_data_seconds_total"), 0.25);
  EXPECT_EQ(ValueOf("upipe_hidden_seconds_total"), 1);
  EXPECT_EQ(ValueOf("upipe_step_own_seconds"), 3);
  EXPECT_EQ(ValueOf("upipe_held_out_loss"), 2.75);                    // the last one there was
  EXPECT_EQ(ValueOf("upipe_causal_mfu_ratio"), 8e12 / 4 / 4 / 1e12);  // FLOPs / ranks / s / peak
  const auto stage = [](const char* name) {
    return absl::StrCat("node=\"n1\",slot=\"0\",stage=\"", name, "\",worker=\"w1\"");
  };
  EXPECT_EQ(ValueOf("upipe_step_stage_seconds", stage("attention")), 2);
  EXPECT_EQ(ValueOf("upipe_step_stage_seconds", stage("mlp")), 0);  // left out: took no time
  EXPECT_EQ(ValueOf("upipe_stage_seconds_total", stage("attention")), 4);
  const std::string ring = "node=\"n1\",operation=\"ring\",slot=\"0\",worker=\"w1\"";
  EXPECT_EQ(ValueOf("upipe_comm_seconds_total", ring), 1);
  EXPECT_EQ(ValueOf("upipe_comm_bytes_total", ring), 2 << 20);
  EXPECT_EQ(ValueOf("upipe_comm_calls_total", ring), 12);
  const std::string weights =
      "node=\"n1\",pool=\"device\",slot=\"0\",tag=\"weights\",worker=\"w1\"";
  EXPECT_EQ(ValueOf("upipe_memory_bytes", weights), 10);
  EXPECT_EQ(ValueOf("upipe_memory_tag_peak_bytes", weights), 20);
  EXPECT_EQ(ValueOf("upipe_memory_tag_at_peak_bytes", weights), 19);
  EXPECT_EQ(
      ValueOf("upipe_memory_arena_bytes", "node=\"n1\",pool=\"device\",slot=\"0\",worker=\"w1\""),
      600);
}

TEST_F(WorkerMetricsTest, WhatNobodyKnowsThePeakOfHasNoMfu) {
  v1::StartRank start = StartOf("job-a", 100);
  start.mutable_plan()->clear_peak_flops();
  metrics_->BeginAttempt(start);
  metrics_->Observe(0, ReportOf(1));
  EXPECT_THAT(testing::NamesOf(Text()), Not(Contains("upipe_causal_mfu_ratio")));
}

TEST_F(WorkerMetricsTest, CountersOutliveTheAttemptAndGaugesDoNot) {
  LiveThroughEverything();
  metrics_->EndAttempt(0);
  EXPECT_THAT(testing::NamesOf(Text()),
              ElementsAreArray(testing::NeverAbsent(declared_.descriptors())));
  EXPECT_EQ(ValueOf("upipe_steps_total"), 1);
  metrics_->BeginAttempt(StartOf("job-b", 100));
  metrics_->Observe(0, ReportOf(1));
  EXPECT_EQ(ValueOf("upipe_steps_total"), 2);
  EXPECT_EQ(ValueOf("upipe_checkpoints_total"), 1);
  EXPECT_THAT(testing::SeriesOf(Text(), "upipe_checkpoint_step"), IsEmpty());
}

TEST_F(WorkerMetricsTest, NoScrapeSeesTwoAttemptsOrOneOfAnother) {
  std::atomic<bool> done = false;
  std::thread changing([&] {
    for (int i = 0; !done; ++i) {
      const bool a = i % 2 == 0;
      metrics_->BeginAttempt(StartOf(a ? "job-a" : "job-b", a ? 100 : 200));
    }
  });
  int seen_a = 0, seen_b = 0;
  for (int i = 0; i < 10'000 && (seen_a < 20 || seen_b < 20); ++i) {
    const std::string text = Text();
    const auto infos = testing::SeriesOf(text, "upipe_attempt_info");
    ASSERT_LE(infos.size(), 1u) << text;
    if (infos.empty()) continue;  // before the first
    const bool a = absl::StrContains(infos.begin()->first, "job-a");
    ++(a ? seen_a : seen_b);
    EXPECT_THAT(testing::SeriesOf(text, "upipe_memory_planned_bytes"),
                Contains(Pair("upipe_memory_planned_bytes{node=\"n1\",pool=\"device\",slot=\"0\","
                              "worker=\"w1\"}",
                              a ? 100 : 200)));
  }
  done = true;
  changing.join();
  EXPECT_GE(seen_a, 20);
  EXPECT_GE(seen_b, 20);
}

TEST_F(WorkerMetricsTest, AThousandAttemptsLeaveNoSeriesBehind) {
  LiveThroughEverything();
  const size_t of_one = testing::SeriesOf(Text()).size();
  for (int i = 0; i < 1000; ++i) {
    metrics_->BeginAttempt(StartOf(absl::StrCat("job-", i), 100));
    metrics_->Observe(0, ReportOf(1));
    metrics_->EndAttempt(0);
  }
  LiveThroughEverything();
  EXPECT_EQ(testing::SeriesOf(Text()).size(), of_one);
}

TEST_F(WorkerMetricsTest, WhatNoTrainerMaySayChangesNothing) {
  metrics_->BeginAttempt(StartOf("job-a", 100));
  metrics_->Observe(0, ReportOf(1));
  const size_t before = testing::SeriesOf(Text()).size();
  v1::StepReport wrong = ReportOf(2);
  wrong.set_hidden_seconds(std::numeric_limits<double>::quiet_NaN());
  wrong.set_data_seconds(-1);
  wrong.mutable_stages(0)->set_stage("dreaming");
  wrong.mutable_comm(0)->set_operation("telepathy");
  AddTag(*wrong.mutable_memory(), "of-mine", 1, 1);
  metrics_->Observe(0, wrong);
  EXPECT_EQ(testing::SeriesOf(Text()).size(), before);
  EXPECT_EQ(ValueOf("upipe_hidden_seconds_total"), 0.5);
  EXPECT_EQ(ValueOf("upipe_data_seconds_total"), 0.125);
}

TEST_F(WorkerMetricsTest, APositionShowsHowFarALongStepIs) {
  metrics_->BeginAttempt(StartOf("job-a", 100));
  metrics_->SetPosition(0, PositionOf(StepPass::kBackward, 1), absl::Seconds(7));
  EXPECT_EQ(ValueOf("upipe_step_layers_done"), 6);
  EXPECT_EQ(ValueOf("upipe_rank_in_place_seconds"), 7);
  const auto passes = testing::SeriesOf(Text(), "upipe_pass");
  EXPECT_EQ(passes.size(), static_cast<size_t>(kNumStepPasses));
  double sum = 0;
  for (const auto& [series, value] : passes) sum += value;
  EXPECT_EQ(sum, 1);
  EXPECT_EQ(passes.at("upipe_pass{node=\"n1\",pass=\"backward\",slot=\"0\",worker=\"w1\"}"), 1);
}

TEST_F(WorkerMetricsTest, TheWorkerSaysWhatItsSlotsAre) {
  metrics_->SetWorker(true, {.free = 1, .taken = 2, .quarantined = 3, .sick = 4});
  const std::string of = "node=\"n1\",state=\"";
  EXPECT_EQ(ValueOf("upipe_slots", of + "free\",worker=\"w1\""), 1);
  EXPECT_EQ(ValueOf("upipe_slots", of + "taken\",worker=\"w1\""), 2);
  EXPECT_EQ(ValueOf("upipe_slots", of + "quarantined\",worker=\"w1\""), 3);
  EXPECT_EQ(ValueOf("upipe_slots", of + "sick\",worker=\"w1\""), 4);
  EXPECT_EQ(ValueOf("upipe_worker_connected", "node=\"n1\",worker=\"w1\""), 1);
}

TEST(LayerProgress, GrowsThroughAStep) {
  v1::RunPlan plan;
  plan.mutable_spec()->mutable_model()->set_num_layers(3);
  LayerProgress progress(plan);
  std::vector<int64_t> done;
  for (const auto& [pass, layer] :
       std::vector<std::pair<StepPass, int>>{{StepPass::kEmbed, -1},
                                             {StepPass::kForward, 0},
                                             {StepPass::kForward, 2},
                                             {StepPass::kLoss, -1},
                                             {StepPass::kBackward, 2},
                                             {StepPass::kBackward, 0},
                                             {StepPass::kEmbed, -1},
                                             {StepPass::kOptimizer, -1},
                                             {StepPass::kCheckpoint, -1}}) {
    done.push_back(progress.DoneAt(PositionOf(pass, layer)));
  }
  EXPECT_THAT(done, ElementsAreArray({0, 0, 2, 3, 3, 5, 6, 6, 6}));
  EXPECT_EQ(progress.DoneAt(PositionOf(StepPass::kEmbed, -1, /*step=*/2)), 0);
}

TEST(LayerProgress, NeverGoesBackWhereLayersAreRebuiltInGroups) {
  v1::RunPlan plan;
  plan.mutable_spec()->mutable_model()->set_num_layers(7);
  plan.mutable_spec()->mutable_memory()->set_checkpoint_stride(3);
  LayerProgress progress(plan);
  std::vector<int64_t> done;
  for (const int layer : {6, 6, 3, 4, 5, 5, 4, 3, 0, 1, 2, 2, 1, 0})
    done.push_back(progress.DoneAt(PositionOf(StepPass::kBackward, layer)));
  EXPECT_THAT(done, ElementsAreArray({7, 7, 8, 8, 8, 8, 8, 8, 11, 11, 11, 11, 11, 11}));
  EXPECT_EQ(progress.DoneAt(PositionOf(StepPass::kOptimizer, -1)), 14);
}

}  // namespace
}  // namespace upipe::worker
