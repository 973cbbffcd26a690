// Resume and commit: what is durable before anybody acts on it.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

using Checkpoints = Scene;

v1::AttemptRecord Stored(MemoryStore& store, int generation) {
  v1::AttemptRecord record;
  record.ParseFromString(store.List(absl::StrCat("attempt/j/", generation))->at(0).value);
  return record;
}

class Resumed : public Scene {
 protected:
  // Generation 2 of a job whose generation 1 committed step 4.
  void SecondStart() {
    RunDurable("/checkpoints");
    Commit(4);
    committed_ = CheckpointOf(4);
    FailOnce();
    PlaceAgain();
    ASSERT_EQ(core_.job("j").record.generation(), 2);
  }
  void Ready(int rank, const std::optional<v1::CheckpointRef>& proposal = {}) {
    v1::RankReport report = ReportOf(rank, v1::RANK_STATE_READY);
    if (proposal) *report.mutable_resume() = *proposal;
    Tell(report);
  }
  v1::CheckpointRef committed_;
};

TEST_F(Resumed, TheChoiceIsDurableBeforeTheAddressTableLeaves) {
  SecondStart();
  for (int r = 3; r > 0; --r) Ready(r);
  EXPECT_FALSE(core_.job("j").attempt->record.resume_decided());
  Ready(0, committed_);
  ASSERT_FALSE(core_.batches().empty());  // with the step that sends
  EXPECT_TRUE(Stored(store_, 2).resume_decided());
  EXPECT_EQ(Stored(store_, 2).resume().step(), 4);
  for (SessionId session : {1, 2}) {
    const auto peers = core_.Sent(session, v1::CoordinatorMessage::kPeers);
    ASSERT_EQ(peers.size(), 1u);
    EXPECT_EQ(peers[0].peers().resume().manifest_sha256(), "sum 4");
  }
  EXPECT_EQ(GetJob(core_.state(), "j")->resume().step(), 4);
  EXPECT_TRUE(HasEvent("RESUME"));
}

TEST_F(Resumed, TheChoiceIsMadeOnceEvenOverARestartOfTheCoordinator) {
  SecondStart();
  for (int r = 3; r > 0; --r) Ready(r);
  Ready(0, committed_);
  core_.Restart();
  v1::CheckpointRef later = committed_;
  later.set_step(6);
  for (const char* worker : {"a", "b"}) {
    v1::Hello hello = HelloOf(worker, 2);
    for (int r = 0; r < 4; ++r) {
      if (core_.job("j").attempt->record.ranks(r).worker() != worker) continue;
      v1::RankReport& report = *hello.add_ranks() = ReportOf(r, v1::RANK_STATE_READY);
      if (r == 0) *report.mutable_resume() = later;
    }
    core_.Do(HelloReceived{worker[0] == 'a' ? 11u : 12u, hello});
  }
  EXPECT_EQ(core_.Sent(12, v1::CoordinatorMessage::kPeers).at(0).peers().resume().step(), 4);
}

TEST_F(Resumed, OnlyRankZeroOfThisGenerationProposes) {
  SecondStart();
  v1::CheckpointRef other = committed_;
  other.set_step(7);
  for (int r = 3; r > 0; --r) Ready(r, other);
  v1::RankReport older = ReportOf(0, v1::RANK_STATE_READY);
  older.mutable_ref()->mutable_fence()->set_generation(1);
  older.mutable_ref()->mutable_fence()->set_nonce("nonce1");
  *older.mutable_resume() = other;
  core_.Do(RankReported{SessionOf(0), 9, older});
  EXPECT_FALSE(core_.job("j").attempt->record.resume_decided());
  Ready(0);
  EXPECT_TRUE(core_.job("j").attempt->record.resume_decided());
  EXPECT_FALSE(core_.job("j").attempt->record.has_resume());
}

TEST_F(Resumed, ACheckpointOfAGenerationToComeIsRefused) {
  SecondStart();
  v1::CheckpointRef foreign = committed_;
  foreign.set_generation(2);
  for (int r = 3; r > 0; --r) Ready(r);
  Ready(0, foreign);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_THAT(cause().message(), HasSubstr("generation 2"));
  EXPECT_TRUE(core_.Sent(2, v1::CoordinatorMessage::kPeers).empty());
}

// Its writer ended between the manifest and the word of it, or what was told of is damaged since.
TEST_F(Resumed, WhatIsResumedFromIsTheNewestCommit) {
  SecondStart();
  for (int r = 3; r > 0; --r) Ready(r);
  v1::CheckpointRef untold = committed_;
  untold.set_step(6);
  Ready(0, untold);
  EXPECT_EQ(GetJob(core_.state(), "j")->last_commit().step(), 6);
}

// The order to the generation before may have died with it, and this one may commit nothing more.
TEST_F(Resumed, WhatIsResumedFromOrdersRetention) {
  SecondStart();
  for (int r = 3; r > 0; --r) Ready(r);
  EXPECT_TRUE(core_.Sent(SessionOf(0), v1::CoordinatorMessage::kRetain).empty());
  Ready(0, committed_);
  const auto retain = core_.Sent(SessionOf(0), v1::CoordinatorMessage::kRetain);
  ASSERT_EQ(retain.size(), 1u);
  EXPECT_EQ(retain[0].retain().fence().generation(), 2);
  EXPECT_EQ(retain[0].retain().newest().step(), committed_.step());
  EXPECT_EQ(retain[0].retain().newest().generation(), committed_.generation());
  EXPECT_EQ(retain[0].retain().keep(), 2);
}

TEST_F(Resumed, WithoutACheckpointThereIsNothingToRetain) {
  SecondStart();
  for (int r = 3; r >= 0; --r) Ready(r);
  EXPECT_TRUE(core_.Sent(SessionOf(0), v1::CoordinatorMessage::kRetain).empty());
}

TEST_F(Resumed, AJobThatWasCompleteNeedsNoFurtherStep) {
  SecondStart();
  committed_.set_step(10);
  for (int r = 3; r > 0; --r) Ready(r);
  Ready(0, committed_);
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(Checkpoints, ACommitIsDurableThenOrdersRetention) {
  RunDurable("/checkpoints");
  Commit(4);
  EXPECT_EQ(Stored(store_, 1).last_commit().step(), 4);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 4);
  const auto retain = core_.Sent(SessionOf(0), v1::CoordinatorMessage::kRetain);
  ASSERT_EQ(retain.size(), 1u);
  EXPECT_EQ(retain[0].retain().newest().step(), 4);
  EXPECT_EQ(retain[0].retain().keep(), 2);
  Commit(4);  // repeated
  EXPECT_TRUE(core_.batches().empty());
  Commit(3);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 4);
  EXPECT_EQ(core_.state().tally.commits, 1);
}

TEST_F(Checkpoints, CommitsOfOtherRanksAndGenerationsCountForNothing) {
  RunDurable("/checkpoints");
  v1::RankReport report = ReportOf(1, v1::RANK_STATE_RUNNING);
  *report.mutable_last_commit() = CheckpointOf(4);
  Tell(report);
  report = ReportOf(0, v1::RANK_STATE_RUNNING);
  *report.mutable_last_commit() = CheckpointOf(4);
  report.mutable_last_commit()->set_generation(2);
  Tell(report);
  EXPECT_FALSE(core_.job("j").record.has_last_commit());
}

TEST_F(Checkpoints, ACommitWhileStoppingCounts) {
  RunDurable("/checkpoints");
  Cancel();
  v1::RankReport report = Exit(0, v1::RANK_STATE_EXITED, 75);
  report.set_stopped_on_notice(true);
  *report.mutable_last_commit() = CheckpointOf(5);
  Tell(report);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 5);
}

TEST_F(Checkpoints, SuccessNeedsTheFinalManifest) {
  RunDurable("/checkpoints");
  Commit(8);
  const auto exit = [&](int rank, v1::RankState state) {
    v1::RankReport report = Exit(rank, state, 0);
    report.mutable_last_step()->set_step(10);
    return report;
  };
  for (int r = 0; r < 4; ++r) Tell(exit(r, v1::RANK_STATE_EXITED));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  v1::RankReport last = exit(0, v1::RANK_STATE_EXITED);
  *last.mutable_last_commit() = CheckpointOf(10);
  Tell(last);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_SUCCEED);
  for (int r = 0; r < 4; ++r) Tell(exit(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(Checkpoints, WithoutTheFinalManifestTheJobIsTriedAgain) {
  RunDurable("/checkpoints");
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = Exit(r, v1::RANK_STATE_GONE, 0);
    report.mutable_last_step()->set_step(10);
    Tell(report);
  }
  EXPECT_EQ(core_.job("j").record.attempts(0).intent(), v1::STOP_INTENT_RESTART);
  EXPECT_THAT(core_.job("j").record.attempts(0).cause().message(),
              HasSubstr("no checkpoint of step 10"));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
}

TEST_F(Checkpoints, ProblemsBecomeEventsOnceAndTheJobGoesOn) {
  RunDurable("/checkpoints");
  v1::RankReport report = ReportOf(1, v1::RANK_STATE_RUNNING);
  v1::CheckpointProblem& full = *report.add_problems();
  full.set_generation(1);
  full.set_step(4);
  full.set_message("no space left");
  Tell(report);
  Tell(report);
  EXPECT_EQ(core_.state().tally.checkpoint_problems, 1);
  EXPECT_THAT(LastEvent(), HasSubstr("rank 1, generation 1, step 4: no space left"));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Restart();
  v1::Hello hello = HelloOf("a", 2);
  *hello.add_ranks() = ReportOf(0, v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = report;
  core_.Do(HelloReceived{11, hello});
  EXPECT_EQ(core_.state().tally.checkpoint_problems, 0);  // known from before
}

}  // namespace
}  // namespace upipe::coordinator
