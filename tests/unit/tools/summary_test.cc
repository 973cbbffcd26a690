// The report's judgement of a run: what makes it fail, and what it says in numbers.
#include "tools/report/summary.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace upipe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

v1::MemoryUsage Memory(int64_t attn_q, int64_t weights) {
  v1::MemoryUsage memory;
  v1::TagBytes* tag = memory.add_tags();
  tag->set_tag("weights");
  tag->set_peak_bytes(weights);
  tag = memory.add_tags();
  tag->set_tag("attn_q");
  tag->set_peak_bytes(attn_q);
  memory.set_peak_bytes(attn_q + weights);
  memory.set_attention_peak_bytes(attn_q);
  return memory;
}

// Two ranks, three steps, held out 2.9 against unigram 3.7; memory as planned.
RunRecord GoodRun() {
  RunRecord record;
  record.job.set_id("demo-1");
  record.job.set_state(v1::JOB_STATE_SUCCEEDED);
  v1::RunPlan& plan = *record.job.mutable_plan();
  plan.mutable_spec()->mutable_train()->set_steps(3);
  plan.mutable_spec()->mutable_train()->set_context(8192);
  plan.mutable_spec()->mutable_parallel()->set_ranks(2);
  for (int rank = 0; rank < 2; ++rank) {
    *plan.add_ranks()->mutable_memory() = Memory(100 + rank, 1000);
    *record.ulysses.add_ranks()->mutable_memory() = Memory(200 + rank, 1000);
    StepReports& reports = record.ranks.emplace_back();
    for (int step = 1; step <= 3; ++step) {
      v1::StepReport& report = reports.emplace_back();
      report.set_step(step);
      report.set_loss(4.0 - 0.25 * step);
      report.set_step_seconds(step == 2 ? 8 : step);
      report.set_tokens_per_second(1000.0 * step);
      report.set_comm_seconds(0.25 * report.step_seconds());
      *report.mutable_memory() = Memory(100 + rank, 1000);
    }
    reports[0].set_held_out_loss(3.5);
    reports[2].set_held_out_loss(2.9);
  }
  record.steps = record.ranks[0];
  record.text.unigram_nats = 3.7;
  record.text.bigram_nats = 2.8;
  return record;
}

TEST(Summary, OfAGoodRun) {
  const Summary summary = Summarize(GoodRun(), 0.3);
  EXPECT_THAT(summary.failures, IsEmpty());
  EXPECT_EQ(summary.state, "SUCCEEDED");
  EXPECT_DOUBLE_EQ(summary.final_loss, 3.25);
  EXPECT_DOUBLE_EQ(summary.held_out_loss, 2.9);
  EXPECT_NEAR(summary.margin_nats, 0.8, 1e-12);
  EXPECT_DOUBLE_EQ(summary.step_seconds, 3);
  EXPECT_DOUBLE_EQ(summary.tokens_per_second, 2000);
  EXPECT_DOUBLE_EQ(summary.comm_share, 0.25);
  EXPECT_EQ(summary.fullest_rank, 1);
  EXPECT_EQ(summary.attention_peak_bytes, 101);
  EXPECT_EQ(summary.ulysses_attention_planned_bytes, 201);
  EXPECT_TRUE(summary.memory_as_planned);
}

TEST(Summary, TooSmallAMarginFailsOnlyWhereOneIsDemanded) {
  RunRecord record = GoodRun();
  record.steps[2].set_held_out_loss(3.5);
  EXPECT_THAT(Summarize(record, 0.3).failures,
              ElementsAre(HasSubstr("3.5000 is 0.2000 nat under")));
  EXPECT_THAT(Summarize(record, std::nullopt).failures, IsEmpty());
}

TEST(Summary, ANanHeldOutLossFails) {
  RunRecord record = GoodRun();
  record.steps[2].set_held_out_loss(std::nan(""));
  EXPECT_EQ(Summarize(record, 0.3).failures.size(), 1u);
}

TEST(Summary, OneByteMoreThanPlannedFails) {
  RunRecord record = GoodRun();
  *record.ranks[0][2].mutable_memory() = Memory(101, 1000);
  const Summary summary = Summarize(record, 0.3);
  EXPECT_FALSE(summary.memory_as_planned);
  EXPECT_THAT(summary.failures,
              ElementsAre(HasSubstr("rank 0 used other memory than planned: peak 1101")));
}

TEST(Summary, HostMemoryIsAPoolOfItsOwn) {
  RunRecord record = GoodRun();
  for (int rank = 0; rank < 2; ++rank) {
    *record.job.mutable_plan()->mutable_ranks(rank)->mutable_host_memory() = Memory(7, 50 + rank);
    *record.ranks[rank][2].mutable_host_memory() = Memory(7, 50 + rank);
  }
  Summary summary = Summarize(record, 0.3);
  EXPECT_THAT(summary.failures, IsEmpty());
  EXPECT_EQ(summary.host_planned_peak_bytes, 58);
  EXPECT_EQ(summary.host_measured_peak_bytes, 58);
  EXPECT_THAT(SummaryText(summary, record),
              HasSubstr("host memory 58 B, planned 58 B: as planned"));
  EXPECT_EQ(SummaryJson(summary, record).at("memory").at("host_measured_peak_bytes"), 58);
  *record.ranks[1][2].mutable_host_memory() = Memory(8, 51);
  summary = Summarize(record, 0.3);
  EXPECT_FALSE(summary.memory_as_planned);
  EXPECT_THAT(summary.failures,
              ElementsAre("rank 1 used other host memory than planned: peak 59 bytes against 58"));
}

TEST(Summary, AJobThatFailedOrEndedEarlySaysSo) {
  RunRecord record = GoodRun();
  record.job.set_state(v1::JOB_STATE_FAILED);
  record.steps.pop_back();
  EXPECT_THAT(Summarize(record, std::nullopt).failures,
              ElementsAre("the job ended FAILED", "step records end at 2 of 3"));
}

TEST(Summary, JsonSaysWhetherAllIsWell) {
  RunRecord record = GoodRun();
  EXPECT_TRUE(SummaryJson(Summarize(record, 0.3), record).at("ok").get<bool>());
  record.job.set_state(v1::JOB_STATE_CANCELLED);
  const nlohmann::json json = SummaryJson(Summarize(record, 0.3), record);
  EXPECT_FALSE(json.at("ok").get<bool>());
  EXPECT_EQ(json.at("memory").at("tags").at("attn_q").at("ulysses_planned_bytes"), 201);
}

TEST(Summary, JsonHasTheLastEvaluationByPosition) {
  RunRecord record = GoodRun();
  for (const int step : {0, 2}) {
    v1::PositionLoss& range = *record.steps[step].add_held_out_loss_by_position();
    range.set_end(4096);
    range.set_loss(3.0 + step);
    range.set_tokens(9);
  }
  const nlohmann::json json = SummaryJson(Summarize(record, 0.3), record);
  EXPECT_EQ(json.at("held_out_loss_by_position"),
            nlohmann::json::parse(R"([{"begin":0,"end":4096,"loss":5.0,"tokens":9}])"));
}

TEST(Summary, Median) {
  EXPECT_DOUBLE_EQ(Median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(Median({4, 1, 2, 3}), 2.5);
}

TEST(Summary, UlyssesIsTheSameJobWithAllHeadsAtOnce) {
  v1::JobSpec spec;
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(4);
  spec.mutable_model()->set_num_heads(8);
  const v1::JobSpec ulysses = AsUlysses(spec);
  EXPECT_EQ(ulysses.parallel().method(), v1::METHOD_ULYSSES);
  EXPECT_FALSE(ulysses.parallel().has_heads_per_stage());
  EXPECT_EQ(ulysses.model().num_heads(), 8);
}

}  // namespace
}  // namespace upipe::report
