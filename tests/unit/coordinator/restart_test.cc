// What ends a generation and what comes after: the queue again with a back-off, or the end when a
// budget is spent.
#include <functional>

#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Restarts = Scene;

TEST_F(Restarts, AFailureIsTriedAgainAfterABackoffAtTheNextGeneration) {
  RunDurable();
  Tell(Exit(2, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_RESTART);
  EXPECT_EQ(GetJob(core_.state(), "j")->shown_state(), "RESTARTING");
  GangGone();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_BACKOFF);
  EXPECT_EQ(core_.job("j").record.restarts().application(), 1);
  EXPECT_FALSE(core_.job("j").record.has_cause());
  const v1::AttemptSummary& summary = core_.job("j").record.attempts(0);
  EXPECT_EQ(summary.generation(), 1);
  EXPECT_EQ(summary.cause().exit_code(), 3);
  EXPECT_EQ(summary.ranks_proven_gone(), 4);
  EXPECT_THAT(summary.workers(), ::testing::ElementsAre("a", "a", "b", "b"));
  core_.Advance(core_.state().timing.backoff_first - absl::Milliseconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  core_.Advance(absl::Milliseconds(1));
  core_.Do(Tick{});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.job("j").record.generation(), 2);
  EXPECT_EQ(core_.job("j").attempt->record.nonce(), "nonce2");
  EXPECT_TRUE(store_.List("attempt/j/1")->empty());
  EXPECT_EQ(store_.List("attempt/j/2")->size(), 1u);
}

TEST_F(Restarts, TheBackoffDoublesWithoutProgressAndSurvivesARestart) {
  RunDurable();
  FailOnce();
  PlaceAgain();
  Meet();
  FailOnce();
  EXPECT_EQ(core_.job("j").retry_at - core_.now().boot, 2 * core_.state().timing.backoff_first);
  core_.Restart();
  EXPECT_EQ(core_.job("j").retry_at - core_.now().boot, 2 * core_.state().timing.backoff_first);
  EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 2);
}

TEST_F(Restarts, AFurtherStepIsProgressWithoutCheckpoints) {
  RunDurable();
  for (int i = 1; i <= 2; ++i) {
    Progress(0, i);
    FailOnce();
    EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 0);
    EXPECT_EQ(core_.job("j").record.best_step(), i);
    PlaceAgain();
    Meet();
  }
  Progress(0, 2);
  FailOnce();
  EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 1);
}

TEST_F(Restarts, OnlyACommitIsProgressWhereThereAreCheckpoints) {
  RunDurable("/checkpoints");
  Progress(0, 5);
  FailOnce();
  EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 1);
  PlaceAgain();
  Meet();
  Commit(6);
  FailOnce();
  EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 0);
}

TEST_F(Restarts, EachBudgetEndsTheJobAndIsNamed) {
  const auto run = [&](int infrastructure, int application, int no_progress,
                       const std::function<void()>& fail) {
    v1::JobSpec spec = Durable();
    spec.mutable_restarts()->set_infrastructure(infrastructure);
    spec.mutable_restarts()->set_application(application);
    spec.mutable_restarts()->set_no_progress(no_progress);
    store_ = MemoryStore();
    core_.Restart();
    Workers();
    SubmitSpec(spec);
    Plan(4);
    Meet();
    fail();
    EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
    return cause().message();
  };
  const auto signal = [&] {
    v1::RankReport report = ReportOf(1, v1::RANK_STATE_EXITED);
    report.set_signal(9);
    Tell(report);
    GangGone();
  };
  EXPECT_THAT(run(0, 3, 3, signal), HasSubstr("restarts.infrastructure allows 0"));
  EXPECT_THAT(run(9, 0, 3, [&] { FailOnce(); }),
              AllOf(HasSubstr("code 3"), HasSubstr("restarts.application allows 0")));
  EXPECT_THAT(run(9, 3, 0, signal), HasSubstr("restarts.no_progress allows 0 in a row"));
}

TEST_F(Restarts, TheBestEvidenceDecidesTheBudget) {
  RunDurable();
  v1::RankReport peer = Exit(0, v1::RANK_STATE_EXITED, 1);
  peer.mutable_cause()->set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  Tell(peer);
  v1::RankReport oom = ReportOf(2, v1::RANK_STATE_EXITED);
  oom.set_signal(9);
  oom.mutable_cause()->set_kind(v1::CAUSE_KIND_OUT_OF_MEMORY);
  Tell(oom);
  GangGone();
  EXPECT_EQ(core_.job("j").record.restarts().infrastructure(), 0);
  EXPECT_EQ(core_.job("j").record.restarts().application(), 1);
  EXPECT_EQ(core_.state().tally.restarts.at({v1::CAUSE_KIND_OUT_OF_MEMORY, "application"}), 1);
}

// Every boundary, checkpoint and result needs all ranks: one proven gone is enough to go on
// elsewhere.
TEST_F(Restarts, AGenerationThatLostARankForSureIsReplacedElsewhereAtOnce) {
  RunDurable();
  core_.Do(HelloReceived{3, HelloOf("c", 2)});
  core_.Do(SessionClosed{2});
  Tell(Exit(0, v1::RANK_STATE_EXITED, 3));
  Tell(Exit(0, v1::RANK_STATE_GONE, 3));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);  // rank 1 can be asked, and is not gone
  Tell(Killed(1, v1::RANK_STATE_GONE));
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_UNKNOWN);
  PlaceAgain();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  for (const auto& rank : core_.job("j").attempt->record.ranks()) EXPECT_NE(rank.worker(), "b");
  EXPECT_EQ(store_.List("attempt/j/1")->size(), 1u);  // its ranks on b hold slots
  // The cut-off worker returns: its ranks are of no live generation.
  core_.Restart();
  v1::Hello hello = HelloOf("b", 2);
  for (int slot : {0, 1}) {
    v1::RankReport& report = *hello.add_ranks();
    report.mutable_ref()->mutable_fence()->set_job_id("j");
    report.mutable_ref()->mutable_fence()->set_generation(1);
    report.mutable_ref()->mutable_fence()->set_nonce("nonce1");
    report.mutable_ref()->set_rank(2 + slot);
    report.set_slot(slot);
    report.set_state(v1::RANK_STATE_RUNNING);
  }
  core_.Do(HelloReceived{12, hello});
  EXPECT_GE(core_.Sent(12, v1::CoordinatorMessage::kStop).size(), 2u);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_BUSY);
  for (v1::RankReport report : hello.ranks()) {
    report.set_state(v1::RANK_STATE_GONE);
    core_.Do(RankReported{12, 3, report});
  }
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_FREE);
  EXPECT_TRUE(store_.List("attempt/j/1")->empty());
}

// A rank is proven gone in the step that places the next generation in its slot.
TEST_F(Restarts, WhatIsProvenAsTheNextGenerationIsPlacedIsWritten) {
  RunDurable();
  core_.Do(HelloReceived{3, HelloOf("c", 1)});
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(3, v1::RANK_STATE_RUNNING);
  core_.Do(SessionClosed{2});
  for (int r : {0, 1}) Tell(Exit(r, v1::RANK_STATE_GONE, 3));
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  PlaceAgain();
  core_.Do(HelloReceived{4, hello});
  ASSERT_EQ(core_.job("j").record.generation(), 2);
  v1::AttemptRecord first;
  ASSERT_TRUE(first.ParseFromString(store_.List("attempt/j/1")->at(0).value));
  EXPECT_EQ(first.ranks(2).state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(first.ranks(3).state(), v1::RANK_STATE_RUNNING);
}

TEST_F(Restarts, WithoutAProvenRankTheGenerationLivesUntilTheExpiry) {
  RunDurable();
  core_.Do(SessionClosed{1});
  core_.Do(SessionClosed{2});
  core_.Advance(core_.state().timing.Expiry() - absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core_.job("j").record.attempts(0).ranks_presumed_gone(), 4);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_BACKOFF);
  core_.Advance(core_.state().timing.backoff_first);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_SILENT_WORKERS);
}

TEST_F(Restarts, ExitZeroBeforeTheLastStepIsAFailure) {
  RunDurable();
  Progress(1, 9);
  Tell(Exit(1, v1::RANK_STATE_EXITED, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_THAT(cause().message(), HasSubstr("after step 9 of 10"));
}

// Only the job can mend it, whatever is left of its budgets; and it explains peers that went first.
TEST_F(Restarts, AFailedSelfCheckIsNeverTriedAgain) {
  RunDurable();
  v1::RankReport peer = Exit(0, v1::RANK_STATE_EXITED, 1);
  peer.mutable_cause()->set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  Tell(peer);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_RESTART);
  for (const int rank : {2, 3}) {
    v1::RankReport exit = Exit(rank, v1::RANK_STATE_EXITED, 1);
    exit.mutable_cause()->set_kind(v1::CAUSE_KIND_SELFCHECK);
    exit.mutable_cause()->set_message("self check: FAIL: loss of step 1 differs");
    Tell(exit);
    EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_FAIL);
  }
  GangGone();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_SELFCHECK);
  EXPECT_EQ(cause().message(), "self check: FAIL: loss of step 1 differs");
  EXPECT_EQ(core_.job("j").record.restarts().application(), 0);
  EXPECT_EQ(core_.job("j").record.attempts_size(), 1);
}

TEST_F(Restarts, AFailedSelfCheckFailsTheJobAtOnce) {
  RunDurable();
  v1::RankReport exit = Exit(2, v1::RANK_STATE_EXITED, 1);
  exit.mutable_cause()->set_kind(v1::CAUSE_KIND_SELFCHECK);
  Tell(exit);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_FAIL);
}

// A reaper that counts the missing would take this one down.
TEST_F(Restarts, AllExitZeroBeforeTheLastStepIsNoSuccess) {
  RunDurable();
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_EXITED, 0));
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_RESTART);
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  EXPECT_NE(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
}

// It tells of the last step before the ranks agree that it is over.
TEST_F(Restarts, TheLastStepOfOneRankIsNoSuccessOfTheOthers) {
  RunDurable();
  for (int r : {0, 1, 2}) Progress(r, 10);
  Progress(3, 9);
  Tell(Exit(3, v1::RANK_STATE_EXITED, 0));
  EXPECT_THAT(cause().message(), HasSubstr("rank 3 exited with code 0 after step 9 of 10"));
  for (int r : {0, 1, 2}) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  Tell(Exit(3, v1::RANK_STATE_GONE, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
}

TEST_F(Restarts, AnExitZeroThatItsWorkerDoesNotBelieveEndsTheGeneration) {
  RunDurable();
  for (int r = 0; r < 4; ++r) Progress(r, 10);
  v1::RankReport exit = Exit(2, v1::RANK_STATE_GONE, 0);
  exit.mutable_cause()->set_kind(v1::CAUSE_KIND_EXIT_CODE);
  exit.mutable_cause()->set_message("left with exit code 0 before it reported its end");
  core_.Do(SessionClosed{1});  // nobody can ask worker a
  Tell(Exit(3, v1::RANK_STATE_GONE, 0));
  Tell(exit);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
}

TEST_F(Restarts, ExitZeroAfterTheLastStepCountsAsPresent) {
  RunDurable();
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = Exit(r, v1::RANK_STATE_EXITED, 0);
    report.mutable_last_step()->set_step(10);
    EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
    Tell(report);
  }
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(Restarts, RanksThatLeaveOnAWorkersNoticeCostNoBudget) {
  RunDurable();
  v1::RankReport report = Exit(2, v1::RANK_STATE_EXITED, 75);
  report.set_stopped_on_notice(true);
  Tell(report);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_REQUEUE);
  EXPECT_GT(core_.Sent(1, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 0);
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core_.job("j").record.restarts().application(), 0);
  EXPECT_EQ(core_.job("j").record.restarts().no_progress(), 0);
}

TEST_F(Restarts, CancelAndSuccessOutrankARestart) {
  RunDurable();
  Tell(Exit(2, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(Cancel(), v1::JOB_STATE_STOPPING);
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_USER);
}

TEST_F(Restarts, AJobThatEndsWhileItIsCancelledHasSucceeded) {
  RunDurable();
  Cancel();
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = Exit(r, v1::RANK_STATE_GONE, 0);
    report.mutable_last_step()->set_step(10);
    Tell(report);
  }
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
  EXPECT_FALSE(core_.job("j").record.has_cause());
}

TEST_F(Restarts, AnotherPlanHashIsNotTriedAgain) {
  Workers();
  SubmitSpec(Durable());
  Plan(4);
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = ReportOf(r, v1::RANK_STATE_READY);
    report.set_plan_hash(78);
    Tell(report);
  }
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
}

TEST_F(Restarts, SummariesOfAttemptsAreBounded) {
  RunDurable();
  for (int i = 1; i <= 20; ++i) {
    Progress(0, i);
    v1::RankReport report = ReportOf(1, v1::RANK_STATE_EXITED);
    report.set_signal(9);
    Tell(report);
    GangGone();
    PlaceAgain();
    Meet();
  }
  EXPECT_EQ(core_.job("j").record.attempts_size(), 16);
  EXPECT_EQ(core_.job("j").record.attempts(15).generation(), 20);
  EXPECT_EQ(store_.List("attempt/")->size(), 1u);
}

}  // namespace
}  // namespace upipe::coordinator
