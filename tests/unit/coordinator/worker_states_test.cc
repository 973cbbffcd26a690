// Hello, reconciliation, silence and restarts of the coordinator.
#include <limits>

#include "common/errors/rpc_error.h"
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

class WorkerStates : public Scene {
 protected:
  // Its hello did not take the place of a later one.
  void ExpectOld(SessionId session) {
    const auto closed = core_.Last<CloseSession>();
    ASSERT_EQ(closed.size(), 1u);
    EXPECT_EQ(closed[0].session, session);
    EXPECT_TRUE(HasReason(closed[0].why, Reason::kSessionReplaced)) << closed[0].why;
  }
};

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

// Of what a record cannot hold the store would refuse the write, and the coordinator end.
TEST_F(WorkerStates, RefusesHellosThatNoRecordHolds) {
  const std::string text(size_t{1} << 20, 'x');
  std::vector<v1::Hello> hellos(3, HelloOf("a", 2));
  hellos[0].set_containment(text);
  (*hellos[1].mutable_newest_generations())["j"] = std::numeric_limits<int64_t>::max();
  hellos[2].add_ranks()->set_state(v1::RANK_STATE_RUNNING);
  hellos[2].mutable_ranks(0)->mutable_last_commit()->set_content_sha256(text);
  for (const v1::Hello& hello : hellos) {
    core_.Do(HelloReceived{1, hello});
    EXPECT_EQ(core_.Last<CloseSession>().at(0).why.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE(core_.state().nodes.empty());
  }
}

TEST_F(WorkerStates, AReportThatNoRankCanMakeEndsTheSession) {
  Running();
  v1::RankReport strange = ReportOf(2, v1::RANK_STATE_RUNNING);
  strange.set_state(static_cast<v1::RankState>(99));
  const v1::RankReport presumed = ReportOf(2, v1::RANK_STATE_PRESUMED_GONE);
  v1::RankReport large = ReportOf(2, v1::RANK_STATE_RUNNING);
  large.mutable_last_step()->mutable_bytes_sent_to_peer()->Resize(1 << 20, 1);
  v1::Hello again = HelloOf("b", 2);
  for (int r : {2, 3}) *again.add_ranks() = ReportOf(r, v1::RANK_STATE_RUNNING);
  SessionId session = 2;
  for (const v1::RankReport& report : {strange, presumed, large}) {
    core_.Do(RankReported{session, 1, report});
    ASSERT_EQ(core_.Last<CloseSession>().size(), 1u);
    EXPECT_EQ(core_.Last<CloseSession>()[0].why.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(core_.job("j").attempt->record.ranks(2).state(), v1::RANK_STATE_RUNNING);
    const Node& b = core_.state().nodes.at("b");
    EXPECT_EQ(StateOf(core_.state(), b, core_.now().boot), v1::NODE_STATE_SUSPECT);
    core_.Do(HelloReceived{++session, again});
  }
  v1::Progress progress;
  *progress.mutable_report() = large.last_step();
  core_.Do(ProgressReceived{session, progress});
  EXPECT_EQ(core_.Last<CloseSession>().size(), 1u);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
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

// A start that died before its hello was heard, and the hello comes after that of the next start.
TEST_F(WorkerStates, AHelloOfAnEarlierStartIsOldThoughItWasNeverMet) {
  Workers();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i3")});
  Submit(4);
  Plan(4);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  core_.Do(SessionClosed{3});
  core_.Do(HelloReceived{4, HelloOf("b", 2, "i2")});
  ExpectOld(4);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_TRUE(core_.state().nodes.at("b").slots[0].holder.has_value());
  core_.Restart();  // the order outlives the coordinator
  core_.Do(HelloReceived{5, HelloOf("b", 2, "i2")});
  ExpectOld(5);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(WorkerStates, AHelloOfAnEarlierSessionIsOld) {
  Workers();
  v1::Hello hello = HelloOf("b", 2);
  hello.set_session_number(3);
  core_.Do(HelloReceived{3, hello});
  hello.set_session_number(2);
  core_.Do(HelloReceived{4, hello});
  ExpectOld(4);
}

// Another state folder: its starts are numbered on their own.
TEST_F(WorkerStates, AWorkerOnANewStateFolderIsNotOld) {
  Workers();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i7")});
  core_.Do(SessionClosed{3});
  v1::Hello hello = HelloOf("b", 2, "i1");
  hello.set_incarnation("elsewhere");
  hello.set_state_id("elsewhere");
  core_.Do(HelloReceived{4, hello});
  EXPECT_EQ(core_.Sent(4, v1::CoordinatorMessage::kHelloAck).size(), 1u);
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

// As after a restore of the store: the worker knows better what lives in its slot.
TEST_F(WorkerStates, ASlotWithARankTheStoreDoesNotKnowStaysTaken) {
  Starting();
  const int slot = core_.job("j").attempt->record.ranks(2).slot();
  v1::RankReport stranger = ReportOf(2, v1::RANK_STATE_RUNNING);
  stranger.mutable_ref()->mutable_fence()->set_job_id("unknown");
  stranger.mutable_ref()->mutable_fence()->set_nonce("another");
  v1::Hello hello = HelloOf("b", 2);
  *hello.add_ranks() = stranger;
  core_.Do(HelloReceived{3, hello});
  Tell(ReportOf(2, v1::RANK_STATE_GONE));  // its start was refused
  EXPECT_EQ(SlotOf("b", slot), v1::SLOT_STATE_BUSY);
  stranger.set_state(v1::RANK_STATE_GONE);
  core_.Do(RankReported{3, 9, stranger});
  EXPECT_EQ(SlotOf("b", slot), v1::SLOT_STATE_FREE);
}

// A partition ends, and the socket of a dead worker delivers what it still held.
TEST_F(WorkerStates, AHelloOfAnEarlierStartProvesNothing) {
  Workers();
  core_.Do(SessionClosed{2});
  core_.Do(HelloReceived{3, HelloOf("b", 2, "i2")});
  Submit(4);
  Plan(4);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  core_.Do(SessionClosed{3});
  core_.Do(HelloReceived{4, HelloOf("b", 2, "i1")});
  EXPECT_EQ(core_.Last<CloseSession>().at(0).session, 4u);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_TRUE(core_.state().nodes.at("b").slots[0].holder.has_value());
}

TEST_F(WorkerStates, NothingIsPlacedBesideAGenerationTheStoreDoesNotKnow) {
  Workers(4);
  SubmitSpec(Durable());
  v1::RankReport later;
  later.mutable_ref()->mutable_fence()->set_job_id("j");
  later.mutable_ref()->mutable_fence()->set_nonce("later");
  later.mutable_ref()->mutable_fence()->set_generation(3);
  later.set_state(v1::RANK_STATE_RUNNING);
  v1::Hello hello = HelloOf("b", 4);
  *hello.add_ranks() = later;
  (*hello.mutable_newest_generations())["j"] = 3;
  core_.Do(HelloReceived{3, hello});
  Plan(4);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  later.set_state(v1::RANK_STATE_GONE);
  core_.Do(RankReported{3, 9, later});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.job("j").record.generation(), 4);
}

}  // namespace
}  // namespace upipe::coordinator
