// What the core counts for whoever exports it: waits, restarts, what was done in vain.
#include "coordinator/core/tally.h"

#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

TEST(WaitCounts, AWaitBelongsToTheFirstBoundItDoesNotExceed) {
  WaitCounts waits;
  waits.Add(absl::ZeroDuration());
  waits.Add(absl::Seconds(1));
  waits.Add(absl::Seconds(1.5));
  waits.Add(absl::Hours(24 * 30));
  waits.Add(-absl::Seconds(5));  // the wall clock was set back
  EXPECT_EQ(waits.counts[0], 3);
  EXPECT_EQ(waits.counts[1], 1);
  EXPECT_EQ(waits.counts.back(), 1);
  EXPECT_EQ(waits.seconds, 2.5 + 24 * 30 * 3600);
}

class TallyTest : public Scene {
 protected:
  const Tally& tally() { return core_.state().tally; }
  int64_t RestartWaits() {
    int64_t sum = 0;
    for (const int64_t count : tally().restart_waits.counts) sum += count;
    return sum;
  }
  void Later(double seconds) {
    core_.Advance(absl::Seconds(seconds));
    Heartbeats();
  }
  // Four ranks, five seconds to start.
  void RunAfterFiveSeconds() {
    Workers();
    SubmitSpec(Durable("/checkpoints"));
    Plan(4);
    Later(5);
    Meet();
  }
  void CommitWrittenIn(int64_t step, double seconds) {
    v1::RankReport report = ReportOf(0, v1::RANK_STATE_RUNNING);
    *report.mutable_last_commit() = CheckpointOf(step);
    report.mutable_last_commit()->set_write_seconds(seconds);
    Tell(report);
  }
};

TEST_F(TallyTest, TimeIsKeptUpToACheckpointsStepBoundary) {
  RunAfterFiveSeconds();
  EXPECT_EQ(tally().lost_seconds, 4 * 5);  // starting
  EXPECT_EQ(tally().kept_seconds, 0);
  Later(10);
  CommitWrittenIn(3, 2);
  EXPECT_EQ(tally().kept_seconds, 4 * 8);
  EXPECT_EQ(core_.job("j").record.last_commit_unix_millis(), core_.now().unix_millis);
  Progress(0, 5);
  Later(4);
  FailOnce();
  EXPECT_EQ(tally().kept_seconds, 4 * 8);
  EXPECT_EQ(tally().lost_seconds, 4 * (5 + 2 + 4));
  EXPECT_EQ(tally().lost_steps, 2);  // 4 and 5
}

TEST_F(TallyTest, SuccessKeepsEverything) {
  Running();
  Later(7);
  Progress(0, core_.job("j").record.spec().train().steps());
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_EXITED, 0));
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(tally().kept_seconds, 4 * 7);
  EXPECT_EQ(tally().lost_seconds, 0);
  EXPECT_EQ(tally().lost_steps, 0);
  EXPECT_EQ(core_.state().num_ended.at(v1::JOB_STATE_SUCCEEDED), 1);
}

TEST_F(TallyTest, WithoutCheckpointsAFailureLosesAllSteps) {
  RunDurable();
  Progress(0, 4);
  FailOnce();
  EXPECT_EQ(tally().lost_steps, 4);
}

TEST_F(TallyTest, ThoseOfAnEarlierAttemptAreNotLostAgain) {
  RunAfterFiveSeconds();
  CommitWrittenIn(3, 0);
  FailOnce();
  PlaceAgain();
  v1::RankReport ready = ReportOf(0, v1::RANK_STATE_READY);
  *ready.mutable_resume() = core_.job("j").record.last_commit();
  Tell(ready);
  for (int r = 1; r < 4; ++r) Tell(ReportOf(r, v1::RANK_STATE_READY));
  TellAll(v1::RANK_STATE_RUNNING);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  Progress(0, 4);
  FailOnce();
  EXPECT_EQ(tally().lost_steps, 1);
}

TEST_F(TallyTest, AQueueWaitEndsWithTheFirstAttemptAndARestartIsMeasured) {
  RunAfterFiveSeconds();
  EXPECT_EQ(tally().queue_waits.seconds, 5);
  EXPECT_EQ(RestartWaits(), 0);
  FailOnce();
  const double backoff = absl::ToDoubleSeconds(core_.job("j").retry_at - core_.now().boot);
  PlaceAgain();
  Later(3);
  Meet();
  EXPECT_EQ(tally().queue_waits.seconds, 5);
  EXPECT_EQ(RestartWaits(), 1);
  EXPECT_EQ(tally().restart_waits.seconds, backoff + 3);
}

TEST_F(TallyTest, EndedJobsAreCountedUntilTheirRecordsGo) {
  Workers();
  for (int i = 0; i < 5; ++i) {
    Submit(4, absl::StrCat("job-", i));
    Cancel(absl::StrCat("job-", i));
  }
  EXPECT_EQ(core_.state().num_ended.at(v1::JOB_STATE_CANCELLED), 5);
  core_.Restart();
  EXPECT_EQ(core_.state().num_ended.at(v1::JOB_STATE_CANCELLED), 5);
  core_.state().retention.jobs = 2;
  core_.Do(Tick{});
  EXPECT_EQ(core_.state().num_ended.at(v1::JOB_STATE_CANCELLED), 2);
}

}  // namespace
}  // namespace upipe::coordinator
