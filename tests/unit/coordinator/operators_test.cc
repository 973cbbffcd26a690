// The operator's word about workers, workers that leave, and stores that were restored.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Operators : public Scene {
 protected:
  ReplyNode Answer() { return core_.Last<ReplyNode>().at(0); }
  ReplyNode Drain(const std::string& worker) {
    core_.Do(DrainReceived{next_call_++, worker, "new disk"});
    return Answer();
  }
  ReplyNode Fence(const std::string& worker) {
    core_.Do(FenceNodeReceived{next_call_++, worker});
    return Answer();
  }
  ReplyNode Forget(const std::string& worker) {
    core_.Do(ForgetNodeReceived{next_call_++, worker});
    return Answer();
  }
};

TEST_F(Operators, ACordonIsDurableAndOutlivesHellos) {
  Workers();
  core_.Do(CordonReceived{1, "b", "broken fan"});
  EXPECT_TRUE(Answer().node->cordoned());
  core_.Restart();
  Workers();
  EXPECT_EQ(core_.state().nodes.at("b").record.cordon_reason(), "broken fan");
  Submit(4);
  Plan(4);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_CORDONED);
  core_.Do(UncordonReceived{2, "b"});
  EXPECT_FALSE(Answer().node->cordoned());
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  core_.Do(CordonReceived{3, "nobody", ""});
  EXPECT_EQ(Answer().node.status().code(), absl::StatusCode::kNotFound);
}

TEST_F(Operators, ADrainMovesJobsElsewhereAfterACheckpoint) {
  RunDurable("/checkpoints");
  core_.Do(HelloReceived{3, HelloOf("c", 2)});
  const ReplyNode reply = Drain("b");
  EXPECT_THAT(reply.job_ids, ElementsAre("j"));
  EXPECT_TRUE(reply.node->cordoned());
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_REQUEUE);
  for (SessionId session : {1, 2}) {
    EXPECT_EQ(core_.Sent(session, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(),
              600'000);
  }
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = Exit(r, v1::RANK_STATE_GONE, 75);
    report.set_stopped_on_notice(true);
    if (r == 0) *report.mutable_last_commit() = CheckpointOf(5);
    Tell(report);
  }
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 5);
  EXPECT_EQ(core_.job("j").record.restarts().ByteSizeLong(), 0u);
  PlaceAgain();
  for (const auto& rank : core_.job("j").attempt->record.ranks()) EXPECT_NE(rank.worker(), "b");
  EXPECT_THAT(Drain("b").job_ids, ElementsAre());
}

TEST_F(Operators, AGraceEndsWhenARankFailsOrNoBoundaryIsNear) {
  RunDurable("/checkpoints");
  Drain("b");
  Tell(Exit(0, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 0);
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  core_.Do(UncordonReceived{next_call_++, "b"});
  PlaceAgain();
  Meet();
  Progress(0, 1, 3600);
  Drain("b");
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 0);
}

TEST_F(Operators, AGraceGoesOnOverARestartOfTheCoordinator) {
  RunDurable("/checkpoints");
  Drain("b");
  const absl::Duration passed = absl::Minutes(4);
  core_.Advance(passed);
  core_.Restart();
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(2, v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = ReportOf(3, v1::RANK_STATE_RUNNING);
  core_.Do(HelloReceived{12, hello});
  const v1::StopRanks stop = core_.Sent(12, v1::CoordinatorMessage::kStop).at(0).stop();
  EXPECT_EQ(absl::Milliseconds(stop.grace_millis()), core_.state().timing.drain_grace - passed);
}

TEST_F(Operators, AWorkerThatLeavesIsDrained) {
  RunDurable("/checkpoints");
  HeartbeatReceived heartbeat{2, 5};
  heartbeat.heartbeat.set_leaving(true);
  core_.Do(heartbeat);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_REQUEUE);
  EXPECT_FALSE(core_.state().nodes.at("b").record.cordoned());
  GangGone();
  PlaceAgain();
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_CORDONED);
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i2")});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(Operators, AFenceIsTheWordForASilentNode) {
  RunDurable();
  EXPECT_EQ(Fence("b").node.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Do(SessionClosed{2});
  EXPECT_EQ(Fence("b").node->state(), v1::NODE_STATE_LOST);
  EXPECT_EQ(core_.job("j").attempt->record.ranks(2).state(), v1::RANK_STATE_PRESUMED_GONE);
  EXPECT_THAT(cause().message(), HasSubstr("fenced"));
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_UNKNOWN);
  for (int r : {0, 1}) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_TRUE(Fence("b").node.ok());
}

TEST_F(Operators, AFenceEndsACancelThatWaitsForItsNode) {
  RunDurable();
  core_.Do(SessionClosed{2});
  Cancel();
  for (int r : {0, 1}) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  Fence("b");
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
}

TEST_F(Operators, OnlyALostNodeNobodyWaitsForIsForgotten) {
  RunDurable();
  EXPECT_EQ(Forget("b").node.status().code(), absl::StatusCode::kFailedPrecondition);
  core_.Do(SessionClosed{2});
  EXPECT_THAT(std::string(Forget("b").node.status().message()),
              AllOf(HasSubstr("is silent for "), HasSubstr("not lost yet; fence it first")));
  Fence("b");
  EXPECT_THAT(std::string(Forget("b").node.status().message()), HasSubstr("job j"));
  for (int r : {0, 1}) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(Forget("b").node->worker(), "b");
  EXPECT_FALSE(core_.state().nodes.contains("b"));
  EXPECT_TRUE(store_.List("node/b")->empty());
  core_.Do(HelloReceived{3, HelloOf("c", 2)});
  PlaceAgain();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_TRUE(store_.List("attempt/j/1")->empty());
  core_.Restart();
  EXPECT_EQ(core_.state().nodes.size(), 2u);
}

// Its ranks are presumed gone for good; once back, it is another node, whose slots are its own.
TEST_F(Operators, AForgottenNodeThatComesBackOwesNothing) {
  Workers();
  Submit(4, "z");
  Plan(4, "z");
  core_.Do(SessionClosed{2});
  Cancel("z");
  for (int r : {0, 1}) Tell(ReportOf(r, v1::RANK_STATE_GONE, "z"));
  Fence("b");
  ASSERT_EQ(core_.JobStateOf("z"), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Forget("b").node.ok());
  core_.Do(HelloReceived{3, HelloOf("b", 2)});
  SubmitSpec(Durable());
  Plan(4);
  Meet();
  core_.Restart();
  core_.Do(HelloReceived{4, HelloOf("b", 2, "i2")});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(core_.job("j").record.attempts(0).cause().message(), HasSubstr("worker b restarted"));
}

class Restored : public Operators {
 protected:
  // As `upipe-coordinator --restore` leaves the store.
  void Restore() {
    v1::EpochRecord epoch;
    epoch.set_epoch(1000);
    epoch.set_restored(true);
    ASSERT_TRUE(store_.Commit({Batch{{Write{"meta/epoch", epoch.SerializeAsString(), {}}}}}).ok());
    core_.Restart();
  }
};

TEST_F(Restored, NothingIsPlacedBeforeEveryWorkerSaidWhatItSaw) {
  Workers();
  Submit(2);
  Plan(2);
  Cancel();
  for (int r = 0; r < 2; ++r) Tell(Killed(r, v1::RANK_STATE_GONE));
  core_.Do(SubmitReceived{next_call_++, "k", "request-k", SpecOf(2), true});
  Plan(2, "k");
  Restore();
  core_.Do(ReleaseReceived{next_call_++, "k"});
  v1::Hello a = HelloOf("a", 2);
  core_.Do(HelloReceived{11, a});
  EXPECT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WhyOf("k").reason(), v1::WAIT_REASON_SETTLING);
  core_.Restart();  // the mark is durable
  EXPECT_TRUE(core_.state().restored);
  core_.Do(HelloReceived{13, a});
  EXPECT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_QUEUED);
  v1::Hello b = HelloOf("b", 2);
  (*b.mutable_newest_generations())["k"] = 5;
  core_.Do(HelloReceived{12, b});
  ASSERT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.job("k").record.generation(), 1'000'006);
  core_.Restart();
  EXPECT_FALSE(core_.state().restored);
}

TEST_F(Restored, TheExpiryEndsTheWait) {
  Workers();
  core_.Do(SubmitReceived{next_call_++, "k", "request-k", SpecOf(2), true});
  Plan(2, "k");
  Restore();
  core_.Do(ReleaseReceived{next_call_++, "k"});
  core_.Do(HelloReceived{11, HelloOf("a", 2)});
  core_.Advance(core_.state().timing.Expiry());
  core_.Do(HeartbeatReceived{11, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_STARTING);
  // Whatever the lost worker saw, it was not this.
  EXPECT_EQ(core_.job("k").record.generation(), 1'000'001);
}

TEST_F(Restored, NothingOfAnAttemptIsStartedAfterIt) {
  Workers();
  SubmitSpec(Durable());
  Plan(4);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  Restore();
  core_.Do(HelloReceived{11, HelloOf("a", 2)});
  EXPECT_TRUE(core_.Sent(11, v1::CoordinatorMessage::kStart).empty());
  core_.Do(HelloReceived{12, HelloOf("b", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
}

TEST_F(Restored, WhatAnAttemptHasCommittedSinceTheBackupIsNewerThanItsResume) {
  Workers();
  SubmitSpec(Durable("/checkpoints"));
  Plan(4);
  v1::Hello hellos[] = {HelloOf("a", 2), HelloOf("b", 2)};
  for (int r = 0; r < 4; ++r) *hellos[r / 2].add_ranks() = ReportOf(r, v1::RANK_STATE_RUNNING);
  hellos[0].mutable_ranks(0)->mutable_resume()->set_step(3);
  *hellos[0].mutable_ranks(0)->mutable_last_commit() = CheckpointOf(8);
  Restore();
  core_.Do(HelloReceived{12, hellos[1]});
  core_.Do(HelloReceived{11, hellos[0]});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(core_.job("j").attempt->record.resume().step(), 3);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 8);
}

TEST_F(Restored, AnAttemptThatWorkersKnowALaterOneOfIsOver) {
  RunDurable();
  Restore();
  v1::Hello hello = HelloOf("a", 2);
  (*hello.mutable_newest_generations())["j"] = 3;
  core_.Do(HelloReceived{11, hello});
  core_.Do(HelloReceived{12, HelloOf("b", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_TRUE(HasEvent("RESTORED"));
  core_.Advance(core_.state().timing.backoff_first);
  core_.Do(Tick{});
  EXPECT_EQ(core_.job("j").record.generation(), 1'000'004);
}

}  // namespace
}  // namespace upipe::coordinator
