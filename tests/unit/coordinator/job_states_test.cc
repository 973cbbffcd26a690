// The job table of the control plane, row by row.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using JobStates = Scene;

TEST_F(JobStates, SubmitIsDurableBeforeItsReplyAndIdempotent) {
  Workers();
  Submit(4);
  ASSERT_EQ(core_.batches().size(), 1u);
  EXPECT_EQ(core_.batches()[0].writes[0].key, "job/j");
  EXPECT_EQ(core_.batches()[0].writes[1].key, "request/request-j");
  EXPECT_EQ(core_.Last<StartPlanner>().at(0).memory_per_rank_bytes, 1000);
  ASSERT_EQ(core_.Last<ReplyJob>().size(), 1u);
  core_.Do(SubmitReceived{50, "other", "request-j", SpecOf(4)});
  EXPECT_EQ((*core_.Last<ReplyJob>().at(0).job)->id(), "j");
  EXPECT_TRUE(core_.batches().empty());
  EXPECT_TRUE(core_.Last<StartPlanner>().empty());
}

TEST_F(JobStates, MoreRanksThanSlotsAreRefusedWithBothNumbers) {
  Workers();
  Submit(5);
  const absl::Status status = core_.Last<ReplyJob>().at(0).job.status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("5 ranks"), HasSubstr("4 slots")));
  EXPECT_TRUE(core_.state().jobs.empty());
}

TEST_F(JobStates, WithoutWorkersAJobWaitsForThemButNotForEver) {
  Submit(4);
  EXPECT_THAT(core_.job("j").reason, AllOf(HasSubstr("4 slots"), HasSubstr("have 0")));
  core_.Do(HelloReceived{1, HelloOf("a", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_PLANNING);
  core_.Advance(core_.state().timing.start_deadline);
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("4 slots"), HasSubstr("have 2")));
}

TEST_F(JobStates, TheOfferPlannedForIsTheSmallestOfTheLargest) {
  core_.Do(HelloReceived{1, HelloOf("a", 2, "i1", 500)});
  core_.Do(HelloReceived{2, HelloOf("b", 2, "i1", 900)});
  core_.Do(HelloReceived{3, HelloOf("c", 2, "i1", 700)});
  Submit(3);
  EXPECT_EQ(core_.Last<StartPlanner>().at(0).memory_per_rank_bytes, 700);
  Plan(3, "j", 701);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_PLAN_REFUSED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("701"), HasSubstr("700")));
}

TEST_F(JobStates, HostMemoryCountsBesideTheDevices) {
  Workers();
  Submit(2);
  v1::PlanResult result = PlanOf(2, 600);
  result.mutable_plan()->mutable_ranks(1)->mutable_host_memory()->set_arena_bytes(401);
  core_.Do(PlanFinished{"j", result});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("1001 bytes"), HasSubstr("1000 bytes")));
}

TEST_F(JobStates, TheJobsOwnLimitIsPlannedForAndHeld) {
  Workers();
  v1::JobSpec spec = SpecOf(2);
  spec.mutable_train()->set_memory_per_rank(300);
  core_.Do(SubmitReceived{1, "j", "request-j", spec});
  EXPECT_EQ(core_.Last<StartPlanner>().at(0).memory_per_rank_bytes, 300);
  Plan(2, "j", 301);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("301"), HasSubstr("300")));
}

TEST_F(JobStates, PlacementAvoidsNodesThatOfferTooLittle) {
  core_.Do(HelloReceived{1, HelloOf("a", 2, "i1", 500)});
  core_.Do(HelloReceived{2, HelloOf("b", 2, "i1", 900)});
  Submit(2);
  Plan(2, "j", 600);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  for (const auto& rank : core_.job("j").attempt->record.ranks()) EXPECT_EQ(rank.worker(), "b");
}

TEST_F(JobStates, PlannerRefusalAndTwoCrashesFailTheJob) {
  Workers();
  Submit(4);
  v1::PlanResult refusal;
  refusal.mutable_refusal()->set_message("needs 12 bytes");
  core_.Do(PlanFinished{"j", refusal});
  EXPECT_EQ(cause().message(), "needs 12 bytes");
  Submit(4, "k");
  core_.Do(PlanFinished{"k", absl::InternalError("died of signal 11")});
  EXPECT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_PLANNING);
  EXPECT_EQ(core_.Last<StartPlanner>().size(), 1u);
  core_.Do(PlanFinished{"k", absl::InternalError("died of signal 11")});
  EXPECT_EQ(core_.JobStateOf("k"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(core_.job("k").record.cause().message(), HasSubstr("2 times"));
}

TEST_F(JobStates, TheAttemptIsWrittenWithItsStartAndStartIsRepeatedUntilAcknowledged) {
  Workers();
  Submit(4);
  Plan(4);
  bool written = false;
  for (const Write& write : core_.batches().at(0).writes) written |= write.key == "attempt/j/1";
  EXPECT_TRUE(written);
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kStart).size(), 2u);
  const auto starts = core_.Sent(2, v1::CoordinatorMessage::kStart);
  ASSERT_EQ(starts.size(), 2u);
  EXPECT_EQ(starts[0].start().ref().fence().generation(), 1);
  EXPECT_EQ(starts[0].start().ref().fence().epoch(), 1);
  EXPECT_EQ(starts[0].start().node_ids(3), "b");
  Tell(ReportOf(0, v1::RANK_STATE_STARTED));
  core_.Advance(core_.state().timing.heartbeat);
  core_.Do(Tick{});
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kStart).size(), 1u);
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kStart).size(), 2u);
}

TEST_F(JobStates, AGangWaitsWholeAndIsNotOvertaken) {
  Workers();
  Submit(2, "first");
  Plan(2, "first");
  Submit(4, "second");
  Plan(4, "second");
  Submit(1, "third");
  Plan(1, "third");
  EXPECT_EQ(core_.JobStateOf("first"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.JobStateOf("second"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(core_.JobStateOf("third"), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(core_.job("second").reason, AllOf(HasSubstr("needs 4"), HasSubstr("2 of 4")));
  EXPECT_EQ(GetJob(core_.state(), "third")->reason(), "behind second");
  core_.Do(CancelReceived{90, "second"});
  EXPECT_EQ(core_.JobStateOf("third"), v1::JOB_STATE_STARTING);
}

TEST_F(JobStates, TheAddressTableGoesOutOnceAllAreReady) {
  Starting();
  for (int r = 0; r < 3; ++r) Tell(ReportOf(r, v1::RANK_STATE_READY));
  EXPECT_TRUE(core_.Sent(1, v1::CoordinatorMessage::kPeers).empty());
  Tell(ReportOf(3, v1::RANK_STATE_READY));
  ASSERT_EQ(core_.Sent(1, v1::CoordinatorMessage::kPeers).size(), 1u);
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kPeers).at(0).peers().addresses(3), "address 3");
  core_.Advance(core_.state().timing.heartbeat);
  core_.Do(Tick{});
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kPeers).size(), 1u);
  TellAll(v1::RANK_STATE_RUNNING);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
}

TEST_F(JobStates, AnotherPlanHashIsAnErrorNamingTheRanks) {
  Starting();
  for (int r = 0; r < 4; ++r) {
    v1::RankReport report = ReportOf(r, v1::RANK_STATE_READY);
    if (r % 2 == 1) report.set_plan_hash(78);
    Tell(report);
  }
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_THAT(cause().message(), HasSubstr("ranks 1, 3"));
}

TEST_F(JobStates, StartingHasADeadlineFromTheLastLaunch) {
  Starting();
  core_.Advance(absl::Seconds(60));
  TellAll(v1::RANK_STATE_STARTED);
  for (int r = 0; r < 3; ++r) Tell(ReportOf(r, v1::RANK_STATE_READY));
  core_.Advance(core_.state().timing.start_deadline - absl::Seconds(1));
  Heartbeats();
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_LAUNCH);
  EXPECT_EQ(cause().rank(), 3);
  EXPECT_THAT(cause().message(), HasSubstr("rank 3 on b"));
}

TEST_F(JobStates, ALaunchErrorFailsTheJob) {
  Starting();
  v1::RankReport report = ReportOf(2, v1::RANK_STATE_GONE);
  report.mutable_cause()->set_kind(v1::CAUSE_KIND_LAUNCH);
  report.mutable_cause()->set_message("no such file");
  Tell(report);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_LAUNCH);
  EXPECT_EQ(cause().message(), "no such file");
}

TEST_F(JobStates, ADeathKillsTheGangAndEndsOnProof) {
  Running();
  Tell(Exit(2, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  const auto stops = core_.Sent(1, v1::CoordinatorMessage::kStop);
  ASSERT_EQ(stops.size(), 1u);
  EXPECT_EQ(stops[0].stop().grace_millis(), 0);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_BUSY);  // exited is not gone
  Tell(Exit(2, v1::RANK_STATE_GONE, 3));
  for (int r : {0, 1, 3}) {
    EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
    EXPECT_EQ(SlotOf(r < 2 ? "a" : "b", r % 2), v1::SLOT_STATE_BUSY);
    Tell(Killed(r, v1::RANK_STATE_GONE));
    EXPECT_EQ(SlotOf(r < 2 ? "a" : "b", r % 2), v1::SLOT_STATE_FREE);
  }
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(cause().rank(), 2);
  EXPECT_EQ(cause().exit_code(), 3);
  EXPECT_EQ(cause().node(), "b");
}

// A worker without its coordinator ends its ranks; ranks elsewhere see only that their peers left.
TEST_F(JobStates, AWorkersOwnVerdictExplainsAPeerFailure) {
  Running();
  v1::RankReport peer = Exit(0, v1::RANK_STATE_EXITED, 1);
  peer.mutable_cause()->set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  Tell(peer);
  v1::RankReport alone = Killed(2, v1::RANK_STATE_EXITED);
  alone.mutable_cause()->set_kind(v1::CAUSE_KIND_NODE_LOST);
  alone.mutable_cause()->set_message("no heartbeat was acknowledged for 3 s");
  Tell(alone);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(cause().rank(), 2);
}

TEST_F(JobStates, TheBestEvidenceBecomesTheCause) {
  Running();
  v1::RankReport peer = Exit(0, v1::RANK_STATE_EXITED, 1);
  peer.mutable_cause()->set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  Tell(peer);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_PEER_FAILURE);
  v1::RankReport oom = ReportOf(2, v1::RANK_STATE_EXITED);
  oom.set_signal(9);
  oom.mutable_cause()->set_kind(v1::CAUSE_KIND_OUT_OF_MEMORY);
  oom.mutable_cause()->set_evidence("memory.events oom_kill +1");
  Tell(oom);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_OUT_OF_MEMORY);
  EXPECT_EQ(cause().rank(), 2);
  Tell(Exit(3, v1::RANK_STATE_EXITED, 1));
  Tell(Killed(1, v1::RANK_STATE_EXITED));
  EXPECT_EQ(cause().rank(), 2);
}

TEST_F(JobStates, AllExitZeroSucceedsWhenAllAreGone) {
  Running();
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_EXITED, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(Cancel(), v1::JOB_STATE_STOPPING);  // the reply says finished
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_SUCCEED);
  for (int r = 0; r < 4; ++r) Tell(Exit(r, v1::RANK_STATE_GONE, 0));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_SUCCEEDED);
  EXPECT_FALSE(core_.job("j").record.has_cause());
}

TEST_F(JobStates, AStepThatNoProgressToldComesWithTheEnd) {
  Running();
  const auto end = [&](int rank, int64_t step) {
    v1::RankReport report = Exit(rank, v1::RANK_STATE_EXITED, 0);
    report.mutable_last_step()->set_step(step);
    Tell(report);
    return core_.Last<PublishReport>();
  };
  core_.Do(ProgressReceived{SessionOf(0), [&] {
                              v1::Progress progress;
                              *progress.mutable_ref() = ReportOf(0, v1::RANK_STATE_RUNNING).ref();
                              progress.mutable_report()->set_step(5);
                              return progress;
                            }()});
  EXPECT_THAT(end(1, 9), ::testing::IsEmpty());  // published is rank 0
  EXPECT_EQ(core_.job("j").attempt->record.ranks(1).last_report().step(), 9);
  EXPECT_THAT(end(2, 5), ::testing::IsEmpty());
  const auto published = end(0, 9);
  ASSERT_EQ(published.size(), 1u);
  EXPECT_EQ(published[0].report.step(), 9);
  EXPECT_EQ(core_.job("j").attempt->record.ranks(0).last_report().step(), 9);
  EXPECT_THAT(end(0, 9), ::testing::IsEmpty());  // repeated
  EXPECT_THAT(end(0, 8), ::testing::IsEmpty());
  EXPECT_EQ(core_.job("j").attempt->record.ranks(0).last_report().step(), 9);
}

TEST_F(JobStates, AReportThatComesLateTakesNothingBack) {
  Running();
  Tell(ReportOf(1, v1::RANK_STATE_STARTED));
  EXPECT_EQ(core_.job("j").attempt->record.ranks(1).state(), v1::RANK_STATE_RUNNING);
}

TEST_F(JobStates, ExitZeroBeforeTheRanksMetIsAFailure) {
  Starting();
  Tell(ReportOf(0, v1::RANK_STATE_STARTED));
  v1::RankReport report = Exit(0, v1::RANK_STATE_EXITED, 0);
  Tell(report);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_RESTART);
}

// A store restored from a backup of the start does not know that they met.
TEST_F(JobStates, ExitZeroAfterTheLastStepIsNoneWhateverTheStoreKnows) {
  Starting();
  v1::RankReport report = Exit(0, v1::RANK_STATE_EXITED, 0);
  report.mutable_last_step()->set_step(10);  // of fewer
  Tell(report);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_FALSE(core_.job("j").attempt->record.ranks(0).left_early());
}

TEST_F(JobStates, CancelBeforePlacementEndsAtOnce) {
  Workers();
  Submit(4);
  EXPECT_EQ(Cancel(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(core_.Last<KillPlanner>().size(), 1u);
  Plan(4);  // the child was faster than the signal
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
  core_.Do(CancelReceived{91, "nobody"});
  EXPECT_EQ(core_.Last<ReplyJob>().at(0).job.status().code(), absl::StatusCode::kNotFound);
}

TEST_F(JobStates, CancelGivesGraceThenKillsAndWaitsForProof) {
  Running();
  EXPECT_EQ(Cancel(), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 5000);
  core_.Advance(absl::Seconds(6));
  Heartbeats();
  core_.Do(Tick{});
  EXPECT_EQ(core_.Sent(2, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 0);
  for (int r = 0; r < 3; ++r) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  Tell(Killed(3, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_USER);
}

// A worker that never got the start proves it.
TEST_F(JobStates, AStopNamesTheRanksItIsFor) {
  Starting();
  Tell(ReportOf(2, v1::RANK_STATE_GONE));
  const v1::StopRanks stop = core_.Sent(2, v1::CoordinatorMessage::kStop).at(0).stop();
  ASSERT_EQ(stop.ranks_size(), 1);
  EXPECT_EQ(stop.ranks(0).rank(), 3);
  EXPECT_EQ(stop.ranks(0).slot(), core_.job("j").attempt->record.ranks(3).slot());
}

TEST_F(JobStates, CancelRaisesAFailingStop) {
  Running();
  Tell(Exit(2, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(Cancel(), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_CANCEL);
  for (int r = 0; r < 4; ++r) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Cancel(), v1::JOB_STATE_CANCELLED);
}

TEST_F(JobStates, ACancelledJobWithASilentNodeStaysUntilTheExpiry) {
  Running();
  core_.Do(SessionClosed{2});
  Cancel();
  for (int r : {0, 1}) Tell(Killed(r, v1::RANK_STATE_GONE));
  core_.Advance(absl::Seconds(100));
  core_.Do(HeartbeatReceived{1, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_THAT(core_.job("j").reason, HasSubstr("gone on b"));
  core_.Advance(core_.state().timing.Expiry() - absl::Seconds(100));
  core_.Do(HeartbeatReceived{1, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(core_.job("j").attempt->record.ranks(2).state(), v1::RANK_STATE_PRESUMED_GONE);
}

TEST_F(JobStates, ATerminalJobStaysAndItsLiveRanksAreKilled) {
  Running();
  core_.Do(SessionClosed{2});
  Tell(Exit(0, v1::RANK_STATE_GONE, 3));
  Tell(Killed(1, v1::RANK_STATE_GONE));  // dead: everybody who can be asked is gone
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(2, v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = ReportOf(3, v1::RANK_STATE_RUNNING);
  core_.Do(HelloReceived{3, hello});
  EXPECT_GE(core_.Sent(3, v1::CoordinatorMessage::kStop).size(), 1u);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_BUSY);
  Tell(Killed(2, v1::RANK_STATE_GONE));
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_FREE);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
}

}  // namespace
}  // namespace upipe::coordinator
