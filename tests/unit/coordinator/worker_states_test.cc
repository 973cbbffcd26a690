// Hello, reconciliation, silence and restarts of the coordinator.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

using WorkerStates = Scene;

TEST_F(WorkerStates, HelloAcknowledgesWithEpochAndTiming) {
  core_.Do(HelloReceived{1, HelloOf("a", 2)});
  const auto acks = core_.Sent(1, v1::CoordinatorMessage::kHelloAck);
  ASSERT_EQ(acks.size(), 1u);
  EXPECT_EQ(acks[0].hello_ack().epoch(), 1);
  EXPECT_EQ(acks[0].hello_ack().timing().autonomy_millis(), 300000);
  core_.Do(HeartbeatReceived{1, 17});
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kHeartbeatAck).at(0).heartbeat_ack().sequence(),
            17u);
}

TEST_F(WorkerStates, RefusesImpossibleHellos) {
  Workers();
  core_.Do(HelloReceived{3, HelloOf("a", 2, "i2")});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).why.code(), absl::StatusCode::kAlreadyExists);
  core_.Do(HelloReceived{4, HelloOf("bad name", 2)});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).why.code(), absl::StatusCode::kInvalidArgument);
  core_.Do(HelloReceived{5, HelloOf("c", 0)});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).why.code(), absl::StatusCode::kInvalidArgument);
  v1::Hello ahead = HelloOf("d", 1);
  ahead.set_epoch(9);
  core_.Do(HelloReceived{6, ahead});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).why.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(core_.state().nodes.size(), 2u);
  core_.Do(HeartbeatReceived{77, 1});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).session, 77u);
}

TEST_F(WorkerStates, ASilentWorkerIsSuspectAndGetsNothing) {
  Running();
  core_.Advance(core_.state().timing.SuspectAfter());
  core_.Do(HeartbeatReceived{1, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  EXPECT_TRUE(core_.Sent(2, v1::CoordinatorMessage::kStop).empty());
  EXPECT_EQ(core_.job("j").record.events().rbegin()->kind(), "SUSPECT");
  const Node& b = core_.state().nodes.at("b");
  EXPECT_EQ(StateOf(core_.state(), b, core_.now().boot), v1::NODE_STATE_SUSPECT);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_UNKNOWN);
}

TEST_F(WorkerStates, NothingIsPlacedOnAClosedSession) {
  Workers();
  core_.Do(SessionClosed{2});
  Submit(4);
  Plan(4);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(core_.job("j").reason, HasSubstr("2 belong to silent workers"));
  core_.Do(HelloReceived{3, HelloOf("b", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(WorkerStates, SilencePastTheExpiryLosesTheNodeAndTheJob) {
  Running();
  core_.Advance(core_.state().timing.Expiry() - absl::Seconds(1));
  core_.Do(HeartbeatReceived{1, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_THAT(cause().message(), HasSubstr("b"));
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kStop).size(), 1u);
  for (int r : {0, 1}) Tell(Killed(r, v1::RANK_STATE_GONE));
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_UNKNOWN);
  EXPECT_TRUE(core_.state().nodes.at("b").slots[0].holder.has_value());
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i2")});
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_FREE);
}

TEST_F(WorkerStates, AJobThatNeedsALostWorkerStandsInNobodysWay) {
  Workers();
  core_.Advance(core_.state().timing.Expiry() - absl::Seconds(1));
  core_.Do(HeartbeatReceived{1, 1});
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});  // b is LOST, its two slots stay known
  Submit(3, "large");
  Plan(3, "large");
  Submit(2, "small");
  Plan(2, "small");
  EXPECT_EQ(core_.JobStateOf("large"), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(core_.job("large").reason, HasSubstr("2 belong to lost workers"));
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_STARTING);
}

TEST_F(WorkerStates, ANewIncarnationProvesOldRanksGone) {
  Running();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i2")});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(core_.job("j").attempt->record.ranks(2).state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(SlotOf("b", 0), v1::SLOT_STATE_FREE);
  EXPECT_EQ(SlotOf("a", 0), v1::SLOT_STATE_BUSY);
}

TEST_F(WorkerStates, ANewIncarnationEndsEvenRanksThatNeverAnswered) {
  Starting();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i2")});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_TRUE(core_.Sent(3, v1::CoordinatorMessage::kStart).empty());
}

TEST_F(WorkerStates, AReconnectedWorkerIsAdopted) {
  Starting();
  TellAll(v1::RANK_STATE_READY);
  core_.Do(SessionClosed{2});
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(2, v1::RANK_STATE_READY);
  *hello.add_ranks() = ReportOf(3, v1::RANK_STATE_READY);
  core_.Do(HelloReceived{3, hello});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_TRUE(core_.Sent(3, v1::CoordinatorMessage::kStop).empty());
  EXPECT_EQ(core_.Sent(3, v1::CoordinatorMessage::kPeers).size(), 1u);  // soft, said again
}

TEST_F(WorkerStates, AStartThatNeverArrivedIsSentAgain) {
  Starting();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.Sent(3, v1::CoordinatorMessage::kStart).size(), 2u);
}

TEST_F(WorkerStates, ARankMissingFromHelloIsLost) {
  Running();
  core_.Do(SessionClosed{2});
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(2, v1::RANK_STATE_RUNNING);
  core_.Do(HelloReceived{3, hello});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().rank(), 3);
}

TEST_F(WorkerStates, OlderNoncesAndUnknownJobsAreKilled) {
  Running();
  core_.Do(SessionClosed{2});
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = ReportOf(2, v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = ReportOf(3, v1::RANK_STATE_RUNNING);
  v1::RankReport orphan = ReportOf(2, v1::RANK_STATE_RUNNING);
  orphan.mutable_ref()->mutable_fence()->set_job_id("unknown");
  *hello.add_ranks() = orphan;
  v1::RankReport older = ReportOf(3, v1::RANK_STATE_RUNNING);
  older.mutable_ref()->mutable_fence()->set_nonce("older");
  *hello.add_ranks() = older;
  core_.Do(HelloReceived{3, hello});
  std::vector<std::string> killed;
  for (const auto& message : core_.Sent(3, v1::CoordinatorMessage::kStop)) {
    killed.push_back(message.stop().fence().job_id() + "/" + message.stop().fence().nonce());
  }
  EXPECT_THAT(killed, ::testing::UnorderedElementsAre("unknown/nonce1", "j/older"));
  bool told = false;
  for (const LogNote& note : core_.Last<LogNote>()) told |= note.text.find("ORPHAN") == 0;
  EXPECT_TRUE(told);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
}

TEST_F(WorkerStates, AnOrphanHoldsItsSlotUntilProven) {
  v1::Hello hello = HelloOf("a", 1);
  v1::RankReport orphan;
  orphan.mutable_ref()->mutable_fence()->set_job_id("unknown");
  orphan.mutable_ref()->mutable_fence()->set_generation(4);
  orphan.set_state(v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = orphan;
  core_.Do(HelloReceived{1, hello});
  Submit(1);
  Plan(1);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  core_.Advance(core_.state().timing.heartbeat);
  core_.Do(HeartbeatReceived{1, 2});
  core_.Do(Tick{});
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kStop).size(), 1u);
  orphan.set_quarantined(true);
  core_.Do(RankReported{1, 3, orphan});
  EXPECT_EQ(SlotOf("a", 0), v1::SLOT_STATE_QUARANTINED);
  orphan.set_state(v1::RANK_STATE_GONE);
  core_.Do(RankReported{1, 4, orphan});
  EXPECT_EQ(core_.Sent(1, v1::CoordinatorMessage::kRankAck).at(0).rank_ack().sequence(), 4u);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(WorkerStates, ARestartedCoordinatorKnowsNothingFreeBeforeHello) {
  Running();
  core_.Restart();
  EXPECT_EQ(core_.state().epoch, 2);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(StateOf(core_.state(), core_.state().nodes.at("a"), core_.now().boot),
            v1::NODE_STATE_UNKNOWN);
  EXPECT_EQ(SlotOf("a", 0), v1::SLOT_STATE_UNKNOWN);
  core_.Advance(core_.state().timing.Expiry() - absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);  // the expiry counts from here
  v1::Hello hello = HelloOf("a", 2);
  *hello.add_ranks() = ReportOf(0, v1::RANK_STATE_RUNNING);
  *hello.add_ranks() = ReportOf(1, v1::RANK_STATE_RUNNING);
  core_.Do(HelloReceived{1, hello});
  EXPECT_EQ(SlotOf("a", 0), v1::SLOT_STATE_BUSY);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(cause().node(), "b");
}

TEST_F(WorkerStates, ARestartedCoordinatorPlansAgainAndKeepsRequests) {
  Workers();
  Submit(4);
  core_.Restart();
  core_.Do(Tick{});
  EXPECT_EQ(core_.Last<StartPlanner>().size(), 1u);
  core_.Do(SubmitReceived{60, "other", "request-j", SpecOf(4)});
  EXPECT_EQ((*core_.Last<ReplyJob>().at(0).job)->id(), "j");
}

TEST_F(WorkerStates, ListsNewestFirstInPages) {
  Workers();
  for (const char* id : {"one", "two", "three"}) Submit(4, id);
  v1::ListJobsRequest request;
  request.set_page_size(2);
  auto page = ListJobs(core_.state(), request);
  ASSERT_TRUE(page.ok());
  EXPECT_EQ(page->jobs(0).id(), "three");
  EXPECT_EQ(page->jobs(1).id(), "two");
  request.set_page_token(page->next_page_token());
  page = ListJobs(core_.state(), request);
  ASSERT_EQ(page->jobs_size(), 1);
  EXPECT_EQ(page->jobs(0).id(), "one");
  EXPECT_TRUE(page->next_page_token().empty());
  request.set_page_token("x");
  EXPECT_EQ(ListJobs(core_.state(), request).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace upipe::coordinator
