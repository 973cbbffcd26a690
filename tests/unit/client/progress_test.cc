#include "client/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

v1::StepReport Report(int64_t step, double seconds = 2) {
  v1::StepReport report;
  report.set_step(step);
  report.set_total_steps(60);
  report.set_loss(3.25);
  report.set_tokens_per_second(4096.4);
  report.set_step_seconds(seconds);
  report.mutable_memory()->set_current_bytes(1 << 20);
  report.mutable_memory()->set_peak_bytes(3 << 20);
  v1::TagBytes& weights = *report.mutable_memory()->add_tags();
  weights.set_tag("weights");
  weights.set_peak_bytes(2 << 20);
  v1::TagBytes& queries = *report.mutable_memory()->add_tags();
  queries.set_tag("attn_q");
  queries.set_peak_bytes(1 << 20);
  report.mutable_memory()->add_tags()->set_tag("logits");
  return report;
}

v1::Job Running(int64_t generation = 1) {
  v1::Job job;
  job.set_id("demo-abcdef");
  job.set_state(v1::JOB_STATE_RUNNING);
  job.set_generation(generation);
  return job;
}

TEST(Progress, LineTellsStepLossSpeedTimeLeftMemory) {
  Progress progress;
  progress.Take(Running());
  EXPECT_EQ(progress.Line(), "");
  progress.Take(Report(12));
  EXPECT_EQ(
      progress.Line(),
      "step 12/60  loss 3.2500  4,096 tokens/s  left 1 min 36 s  memory 1.0 MiB (peak 3.0 MiB)");
}

TEST(Progress, RestartsAndCheckpointsAreALine) {
  Progress progress;
  v1::Job job = Running(3);
  job.mutable_restarts()->set_infrastructure(2);
  job.add_attempts()->mutable_cause()->set_message("rank 0 was killed");
  job.mutable_last_commit()->set_step(40);
  job.mutable_last_commit()->set_generation(2);
  progress.Take(job);
  progress.Take(Report(41));
  const std::string block = absl::StrJoin(progress.Block(200), "\n");
  EXPECT_THAT(block,
              AllOf(HasSubstr("demo-abcdef  RUNNING  generation 3  step 41/60"),
                    HasSubstr("  restarted twice, last: rank 0 was killed   last checkpoint: "
                              "step 40 of generation 2, 0 B")));
  Progress quiet;
  quiet.Take(Running());
  EXPECT_EQ(absl::StrJoin(quiet.Block(200), "\n"), "demo-abcdef  RUNNING");
}

// A record keeps its first event and the newest ones.
TEST(Progress, EventsAreToldOnceThoughTheOldestAreDropped) {
  Progress progress;
  v1::Job job = Running();
  for (const char* kind : {"PLANNING", "A", "B"}) job.add_events()->set_kind(kind);
  progress.Take(job);
  EXPECT_EQ(progress.TakeNewEvents().size(), 3u);
  job.mutable_events()->DeleteSubrange(1, 1);
  job.add_events()->set_kind("C");
  progress.Take(job);
  EXPECT_THAT(progress.TakeNewEvents(), ElementsAre(testing::EndsWith("C")));
  EXPECT_THAT(progress.TakeNewEvents(), IsEmpty());
  job.mutable_events()->DeleteSubrange(1, 2);
  for (const char* kind : {"D", "E"}) job.add_events()->set_kind(kind);
  progress.Take(job);
  EXPECT_THAT(progress.TakeNewEvents(),
              ElementsAre(testing::EndsWith("D"), testing::EndsWith("E")));
}

TEST(Progress, HostMemoryIsShownWhereAnyIsUsed) {
  Progress progress;
  v1::Job job = Running();
  job.mutable_plan()->add_ranks()->mutable_host_memory()->set_peak_bytes(6 << 20);
  progress.Take(job);
  v1::StepReport report = Report(12);
  report.mutable_host_memory()->add_tags()->set_tag("residual");
  progress.Take(report);
  EXPECT_THAT(progress.Line(), Not(HasSubstr("host")));
  EXPECT_THAT(absl::StrJoin(progress.Block(80), "\n"), Not(HasSubstr("host")));
  report = Report(13);
  report.mutable_host_memory()->set_current_bytes(2 << 20);
  report.mutable_host_memory()->set_peak_bytes(5 << 20);
  v1::TagBytes& tag = *report.mutable_host_memory()->add_tags();
  tag.set_tag("residual");
  tag.set_peak_bytes(5 << 20);
  progress.Take(report);
  EXPECT_THAT(progress.Line(), HasSubstr("memory 1.0 MiB (peak 3.0 MiB)  host 2.0 MiB (peak 5.0"));
  EXPECT_THAT(absl::StrJoin(progress.Block(80), "\n"),
              AllOf(HasSubstr("host memory of rank 0: 2.0 MiB now, peak 5.0 MiB, planned 6.0 MiB"),
                    HasSubstr("residual       ####")));
}

TEST(Progress, HeldOutLossStaysUntilTheNext) {
  Progress progress;
  progress.Take(Running());
  v1::StepReport evaluated = Report(20);
  evaluated.set_held_out_loss(3.5);
  progress.Take(evaluated);
  progress.Take(Report(21));
  EXPECT_THAT(progress.Line(), HasSubstr("held-out 3.5000"));
  EXPECT_THAT(absl::StrJoin(progress.Block(100), "\n"), HasSubstr("held-out 3.5000 (step 20)"));
}

TEST(Progress, TimeLeftFollowsTheRecentPace) {
  Progress progress;
  progress.Take(Running());
  EXPECT_EQ(progress.TimeLeft(), absl::InfiniteDuration());
  for (int step = 1; step <= 10; ++step) progress.Take(Report(step, 1));
  EXPECT_EQ(progress.TimeLeft(), absl::Seconds(50));
  for (int step = 11; step <= 59; ++step) progress.Take(Report(step, 3));
  EXPECT_NEAR(absl::ToDoubleSeconds(progress.TimeLeft()), 3, 0.05);
  progress.Take(Report(60, 3));
  EXPECT_EQ(progress.TimeLeft(), absl::ZeroDuration());
}

TEST(Progress, AnOvertakenReportIsIgnoredUnlessTheJobStartedAnew) {
  Progress progress;
  progress.Take(Running());
  progress.Take(Report(12));
  progress.Take(Report(3));
  EXPECT_THAT(progress.Line(), HasSubstr("step 12/60"));
  progress.Take(Running(2));
  progress.Take(Report(3));
  EXPECT_THAT(progress.Line(), HasSubstr("step 3/60"));
}

TEST(Progress, BlockHasBarsByCategoryAndFitsTheWidth) {
  Progress progress;
  v1::Job job = Running();
  job.mutable_plan()->add_ranks()->mutable_memory()->set_peak_bytes(4 << 20);
  progress.Take(job);
  progress.Take(Report(30));
  const std::vector<std::string> block = progress.Block(80);
  const std::string text = absl::StrJoin(block, "\n");
  EXPECT_THAT(block[0], AllOf(HasSubstr("demo-abcdef  RUNNING  step 30/60  [####"),
                              HasSubstr("####...."), HasSubstr("50 %")));
  EXPECT_THAT(text, AllOf(HasSubstr("4,096 tokens/s"), HasSubstr("left 1 min 0 s"),
                          HasSubstr("planned 4.0 MiB"), HasSubstr("weights        ####"),
                          Not(HasSubstr("logits"))));
  for (const size_t width : {20, 40, 79, 80, 200}) {
    for (const std::string& line : progress.Block(width)) EXPECT_LE(line.size(), width);
  }
}

TEST(Progress, WaitingJobsSayWhy) {
  Progress progress;
  v1::Job job = Running();
  job.set_state(v1::JOB_STATE_QUEUED);
  job.set_reason("needs 4 slots, 2 are free");
  progress.Take(job);
  EXPECT_THAT(progress.Block(80),
              ElementsAre("demo-abcdef  QUEUED", "  needs 4 slots, 2 are free"));
}

TEST(Progress, EachEventIsToldOnce) {
  Progress progress;
  v1::Job job = Running();
  job.add_events()->set_kind("QUEUED");
  progress.Take(job);
  EXPECT_THAT(progress.TakeNewEvents(), ElementsAre(HasSubstr("  QUEUED")));
  EXPECT_THAT(progress.TakeNewEvents(), IsEmpty());
  v1::JobEvent& event = *job.add_events();
  event.set_kind("SUSPECT");
  event.set_message("worker-0 is silent");
  progress.Take(job);
  EXPECT_THAT(progress.TakeNewEvents(), ElementsAre(HasSubstr("  SUSPECT  worker-0 is silent")));
}

}  // namespace
}  // namespace upipe::client
