#include "worker/agent/agent.h"

#include <csignal>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/worker/agent_driver.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Agent, HelloIsTheFirstMessageOfASession) {
  Agent agent;
  agent.Do(SessionClosed{agent.state.session, "cut"});
  agent.After(absl::Seconds(1));
  ASSERT_THAT(agent.All<OpenSession>(), ::testing::SizeIs(1));
  const auto hello = agent.Sent(v1::WorkerMessage::kHello);
  ASSERT_THAT(hello, ::testing::SizeIs(1));
  EXPECT_EQ(hello[0].sequence(), 1u);
  EXPECT_EQ(hello[0].hello().epoch(), 1);
}

TEST(Agent, ARefusedHelloIsToldOncePerReason) {
  Agent agent;
  agent.Do(SessionClosed{agent.state.session, "cut"});
  std::vector<std::string> told;
  for (const char* reason : {"name taken", "name taken", "unreachable", "name taken"}) {
    agent.After(absl::Seconds(1));
    ASSERT_THAT(agent.All<OpenSession>(), ::testing::SizeIs(1));
    agent.Do(SessionClosed{agent.state.session, reason});
    for (const NodeEvent& event : agent.All<NodeEvent>()) told.push_back(event.text);
  }
  EXPECT_THAT(told, ElementsAre(HasSubstr("name taken"), HasSubstr("unreachable"),
                                HasSubstr("name taken")));
}

TEST(Agent, AStartLaunchesOnceAndTheSameStartIsReported) {
  Agent agent;
  agent.Start(1, "a", 0, 2);
  ASSERT_THAT(agent.All<LaunchRank>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<LaunchRank>()[0].slot, 2);
  agent.Do(ProcessStarted{{"a", 0}, 7});
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_STARTED);
  agent.Start(1, "a", 0, 2);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_STARTED);
}

TEST(Agent, ALowerGenerationIsRefusedAndChangesNothing) {
  Agent agent;
  agent.Start(5, "a", 0, 0);
  agent.Start(4, "b", 0, 1);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_GONE);
  EXPECT_THAT(agent.Reported(0).cause().message(), HasSubstr("generation 4 is lower than 5"));
  EXPECT_THAT(agent.Killed(), IsEmpty());
}

TEST(Agent, ALowerEpochIsIgnoredAndAHigherOneTaken) {
  Agent agent;
  agent.Start(1, "a", 0, 0, /*epoch=*/3);
  EXPECT_EQ(agent.state.epoch, 3);
  agent.Start(2, "b", 1, 1, /*epoch=*/2);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_EQ(agent.state.ranks.size(), 1u);
}

TEST(Agent, AnOldCoordinatorIsLeft) {
  Agent agent;
  agent.state.epoch = 9;
  v1::CoordinatorMessage message;
  message.mutable_hello_ack()->set_epoch(8);
  agent.FromCoordinatorMessage(message);
  EXPECT_THAT(agent.All<CloseSession>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.state.phase, SessionPhase::kClosed);
}

TEST(Agent, ABusySlotIsRefused) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Start(1, "a", 1, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_THAT(agent.Reported(1).cause().message(), HasSubstr("slot 0 is held by rank 0"));
  agent.Start(1, "a", 2, 4);
  EXPECT_THAT(agent.Reported(2).cause().message(), HasSubstr("slot 4 does not exist"));
}

TEST(Agent, AHigherGenerationKillsFencesAndStartsOnlyOnProof) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Start(2, "b", 0, 0);
  ASSERT_THAT(agent.Killed(), ElementsAre(0));
  EXPECT_EQ(agent.All<KillRank>()[0].fence_generation, 2);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  agent.Do(ProcessGone{{"a", 0}});
  ASSERT_THAT(agent.All<LaunchRank>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<LaunchRank>()[0].key.nonce, "b");
  // The old slot's series end before the new ones begin.
  EXPECT_TRUE(std::holds_alternative<ReleaseRank>(agent.actions.front()));
}

TEST(Agent, OnlyTheForkedProcessMayAttach) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Do(ProcessStarted{{"a", 0}, 100});
  agent.Attach(1, "a", 0, 666, 1);
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
  agent.Attach(1, "wrong", 0, 100, 2);
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
  agent.Attach(2, "a", 0, 100, 3);
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
  agent.Attach(1, "a", 0, 100, 4);
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_TRUE(agent.All<SendToTrainer>()[0].command.has_assignment());
  agent.Attach(1, "a", 0, 100, 5);
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
}

TEST(Agent, ATrainerThatSaysHelloTwiceIsCutOffAndItsExitIsDue) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  const uint64_t connection = agent.state.connections.begin()->first;
  agent.Attach(1, "another", 0, 100, connection);
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
  EXPECT_THAT(agent.state.connections, IsEmpty());
  agent.After(absl::Seconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

TEST(Agent, ATrainerWhoseReportNobodyCouldTakeIsCutOff) {
  v1::TrainerMessage step;
  step.mutable_report()->mutable_bytes_sent_to_peer()->Resize(1 << 17, 1);
  v1::TrainerMessage address;
  address.mutable_ready()->set_address(std::string(1 << 17, 'x'));
  v1::TrainerMessage commit;
  commit.mutable_committed()->set_content_sha256(std::string(1 << 17, 'x'));
  for (const v1::TrainerMessage& message : {step, address, commit}) {
    Agent agent;
    agent.StartRunning(1, "a", 0, 0);
    agent.Do(FromTrainer{agent.state.connections.begin()->first, message});
    EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
    EXPECT_LT(agent.state.ranks.begin()->second.report.ByteSizeLong(), 1000u);
    agent.After(absl::Seconds(1));
    EXPECT_THAT(agent.Killed(), ElementsAre(0));
  }
}

TEST(Agent, StartsOfACoordinatorThatAcknowledgesNothingAreBounded) {
  Agent agent;
  for (int i = 0; i < 4095; ++i) {
    Rank& rank = agent.state.ranks[{absl::StrCat("n", i), 0}];
    rank.report.set_state(v1::RANK_STATE_GONE);
    rank.acknowledged = true;
  }
  for (int i = 0; i < 3; ++i) agent.Start(1, absl::StrCat("m", i), 0, 99);
  EXPECT_EQ(agent.state.ranks.size(), 4096u);
}

TEST(Agent, PeersAreForgottenWithTheLastRankHoweverItEnded) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  v1::CoordinatorMessage message;
  *message.mutable_peers()->mutable_fence() = agent.FenceOf(1, "a");
  agent.FromCoordinatorMessage(message);
  EXPECT_THAT(agent.state.peers, ::testing::SizeIs(1));
  agent.Do(ProcessLaunchFailed{{"a", 0}, absl::InternalError("no fork")});
  EXPECT_THAT(agent.state.peers, IsEmpty());
}

TEST(Agent, AHelloBeforeTheForkIsKnownWaitsForIt) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Attach(1, "a", 0, 100, 1);
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  agent.Do(ProcessStarted{{"a", 0}, 100});
  EXPECT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));

  agent.Start(1, "a", 1, 1);
  agent.Attach(1, "a", 1, 666, 2);
  agent.Do(ProcessStarted{{"a", 1}, 101});
  EXPECT_THAT(agent.All<CloseTrainer>(), ::testing::SizeIs(1));
}

TEST(Agent, PeersReachRanksThatAreReadyNowOrLater) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Do(ProcessStarted{{"a", 0}, 100});
  agent.Attach(1, "a", 0, 100, 1);
  v1::CoordinatorMessage message;
  *message.mutable_peers()->mutable_fence() = agent.FenceOf(1, "a");
  message.mutable_peers()->add_addresses("x");
  agent.FromCoordinatorMessage(message);
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  v1::TrainerMessage ready;
  ready.mutable_ready()->set_address("x");
  ready.mutable_ready()->set_plan_hash(5);
  agent.Do(FromTrainer{1, ready});
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_READY);
  EXPECT_EQ(agent.Reported(0).plan_hash(), 5u);
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_TRUE(agent.All<SendToTrainer>()[0].command.has_peers());
}

TEST(Agent, AFailedRankTakesItsSiblingsAndNamesTheCulprit) {
  Agent agent;
  for (int rank = 0; rank < 3; ++rank) agent.StartRunning(1, "a", rank, rank);
  agent.Do(ProcessExited{{"a", 1},
                         {.signal = SIGSEGV, .log_tail = {"last words"}},
                         {At(0, 11), At(1, 12), At(2, 10)}});
  EXPECT_THAT(agent.Killed(), ElementsAre(0, 2));
  const v1::RankReport report = agent.Reported(1);
  EXPECT_EQ(report.state(), v1::RANK_STATE_EXITED);
  EXPECT_EQ(report.cause().kind(), v1::CAUSE_KIND_SIGNAL);
  EXPECT_THAT(report.cause().message(), HasSubstr("SIGSEGV"));
  EXPECT_THAT(report.cause().evidence(), HasSubstr("rank 2 is behind, at collective 10 of 12"));
  EXPECT_THAT(report.cause().evidence(),
              HasSubstr("rank 1: step 7, backward, layer 3, inside collective 12"));
  EXPECT_THAT(report.cause().log_tail(), ElementsAre("last words"));
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  EXPECT_TRUE(agent.Reported(0).signal_sent_by_worker());
  EXPECT_EQ(agent.Reported(0).cause().kind(), v1::CAUSE_KIND_PEER_FAILURE);
  EXPECT_THAT(agent.Reported(0).cause().message(), HasSubstr("because rank 1 failed"));
}

TEST(Agent, AnExitOfZeroIsASuccessOnlyAfterFinished) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  v1::TrainerMessage finished;
  finished.mutable_finished();
  agent.Do(FromTrainer{1, finished});
  agent.Do(TrainerClosed{1});
  agent.Do(ProcessExited{{"a", 0}, {.exit_code = 0}, {}});
  EXPECT_THAT(agent.Killed(), IsEmpty());
  EXPECT_FALSE(agent.Reported(0).has_cause());
  agent.Do(ProcessExited{{"a", 1}, {.exit_code = 0}, {}});
  EXPECT_THAT(agent.Reported(1).cause().message(), HasSubstr("before it reported its end"));
}

TEST(Agent, AKillThatCameTooLateIsNotTheCause) {
  for (const bool died_before : {false, true}) {
    Agent agent;
    agent.StartRunning(1, "a", 0, 0);
    agent.Start(2, "b", 0, 0);
    ASSERT_THAT(agent.Killed(), ElementsAre(0));
    ProcessExit exit{.signal = SIGKILL};
    exit.died_before_kill = died_before;
    exit.oom_counters_known = true;
    agent.Do(ProcessExited{{"a", 0}, exit, {}});
    EXPECT_EQ(agent.Reported(0).signal_sent_by_worker(), !died_before);
    EXPECT_EQ(agent.Reported(0).cause().kind(),
              died_before ? v1::CAUSE_KIND_SIGNAL : v1::CAUSE_KIND_PREEMPTION);
  }
}

TEST(Agent, CausesFollowTheEvidence) {
  const auto cause_of = [](ProcessExit exit, std::optional<v1::TrainerFinished> finished = {}) {
    Agent agent;
    agent.StartRunning(1, "a", 0, 0);
    if (finished.has_value()) {
      v1::TrainerMessage message;
      *message.mutable_finished() = *finished;
      agent.Do(FromTrainer{1, message});
    }
    agent.Do(ProcessExited{{"a", 0}, std::move(exit), {}});
    return agent.Reported(0).cause();
  };
  EXPECT_EQ(cause_of({.signal = SIGKILL, .oom_evidence = "memory.events oom_kill +1"}).kind(),
            v1::CAUSE_KIND_OUT_OF_MEMORY);
  EXPECT_EQ(cause_of({.signal = SIGKILL, .oom_counters_known = true}).kind(),
            v1::CAUSE_KIND_SIGNAL);
  EXPECT_THAT(cause_of({.signal = SIGKILL}).evidence(), HasSubstr("probable"));
  EXPECT_EQ(cause_of({.signal = SIGKILL}).kind(), v1::CAUSE_KIND_OUT_OF_MEMORY);
  v1::TrainerFinished finished;
  finished.set_code(14);
  finished.set_message("rank 3 closed the connection");
  EXPECT_EQ(cause_of({.exit_code = 1}, finished).kind(), v1::CAUSE_KIND_EXIT_CODE);
  finished.set_peer_failure(true);
  EXPECT_EQ(cause_of({.exit_code = 1}, finished).kind(), v1::CAUSE_KIND_PEER_FAILURE);
  EXPECT_THAT(cause_of({.exit_code = 1}, finished).message(), HasSubstr("rank 3 closed"));
  finished.set_selfcheck_failed(true);
  EXPECT_EQ(cause_of({.exit_code = 1}, finished).kind(), v1::CAUSE_KIND_SELFCHECK);
  finished.set_device_fault(true);
  EXPECT_EQ(cause_of({.exit_code = 1}, finished).kind(), v1::CAUSE_KIND_DEVICE_FAULT);
}

// What a trainer measured goes with its end; what the kernel ended measured nothing.
TEST(Agent, WhatATrainerMeasuredIsReportedWithItsEnd) {
  for (const bool killed : {false, true}) {
    Agent agent;
    agent.StartRunning(1, "a", 0, 0);
    v1::TrainerMessage message;
    message.mutable_finished()->set_code(8);
    message.mutable_finished()->mutable_measured()->add_ops()->set_measured_bytes(9);
    agent.Do(FromTrainer{1, message});
    ProcessExit exit;
    if (killed) {
      exit.signal = SIGKILL;
    } else {
      exit.exit_code = 1;
    }
    agent.Do(ProcessExited{{"a", 0}, exit, {}});
    EXPECT_EQ(agent.Reported(0).measured().ops_size(), killed ? 0 : 1);
  }
}

TEST(Agent, StopWithoutGraceKillsAndTheGenerationStaysStopped) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Stop(1, "a", absl::ZeroDuration());
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  agent.Stop(1, "a", absl::ZeroDuration());
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.Start(1, "a", 1, 1);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_THAT(agent.Reported(1).cause().message(), HasSubstr("already ordered to stop"));
}

TEST(Agent, ATrainerThatLetsGoOfItsStreamIsKilled) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Do(TrainerClosed{1});
  EXPECT_THAT(agent.Killed(), IsEmpty());  // its exit may be on the way
  agent.After(absl::Seconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

TEST(Agent, WhatIsNotProvenGoneWithinTheBoundIsQuarantined) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Stop(1, "a", absl::ZeroDuration());
  agent.After(absl::Seconds(5));
  agent.AckHeartbeat(0);  // the session stays
  agent.After(agent.state.timing.kill_bound - absl::Milliseconds(5001));
  EXPECT_FALSE(agent.state.ranks.at({"a", 0}).report.quarantined());
  agent.After(absl::Milliseconds(1));
  EXPECT_TRUE(agent.Reported(0).quarantined());
  agent.Start(7, "b", 1, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  agent.Do(ProcessGone{{"a", 0}});
  EXPECT_THAT(agent.All<NodeEvent>().at(0).text, HasSubstr("slot 0 is out of quarantine"));
  EXPECT_FALSE(agent.Reported(0).quarantined());
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_GONE);
}

TEST(Agent, TheAutonomyCountsFromTheSendTimeOfTheLastAcknowledgedHeartbeat) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.After(absl::Seconds(2));
  const BootTime sent = agent.now;
  const uint64_t sequence = agent.Sent(v1::WorkerMessage::kHeartbeat).at(0).sequence();
  agent.now = agent.now + absl::Seconds(1);
  agent.AckHeartbeat(sequence);
  agent.Do(SessionClosed{agent.state.session, "cut"});
  agent.now = sent + (agent.state.timing.autonomy - absl::Milliseconds(1));
  agent.Do(Tick{});
  EXPECT_THAT(agent.Killed(), IsEmpty());
  EXPECT_LE(NextWake(agent.state, agent.now), sent + agent.state.timing.autonomy);
  agent.After(absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

TEST(Agent, ARankWhoseStartNeverCameIsGoneOnceItIsStopped) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Stop(1, "a", absl::Seconds(5), {{0, 0}, {1, 2}});
  const v1::RankReport report = agent.Reported(1);
  EXPECT_EQ(report.state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(report.slot(), 2);
  EXPECT_EQ(report.ref().fence().nonce(), "a");
  EXPECT_THAT(report.cause().message(), HasSubstr("had not started"));
  EXPECT_EQ(agent.state.ranks.at(RankKey{"a", 0}).report.state(), v1::RANK_STATE_RUNNING);
  agent.AckAll();
  EXPECT_EQ(agent.state.ranks.size(), 1u);
}

TEST(Agent, NothingStartsPastTheDeadline) {
  Agent agent;
  agent.Do(SessionClosed{agent.state.session, "cut"});
  agent.After(absl::Seconds(1));
  agent.now = agent.now + agent.state.timing.autonomy;  // its hello is answered late
  v1::CoordinatorMessage answer;
  answer.mutable_hello_ack()->set_epoch(1);
  agent.FromCoordinatorMessage(answer);
  agent.Start(1, "a", 0, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  agent.After(agent.state.timing.heartbeat);
  agent.AckHeartbeat(agent.Sent(v1::WorkerMessage::kHeartbeat).at(0).sequence());
  agent.Start(1, "a", 0, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), ::testing::SizeIs(1));
}

TEST(Agent, AfterAPauseTheDeadlineIsTheFirstAct) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.now = agent.now + absl::Hours(1);
  agent.Start(1, "a", 1, 1);  // an order that was in the queue during the pause
  ASSERT_FALSE(agent.actions.empty());
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  EXPECT_TRUE(std::holds_alternative<NodeEvent>(agent.actions[0]));
  EXPECT_TRUE(std::holds_alternative<KillRank>(agent.actions[1]));
}

TEST(Agent, ReportsAreRepeatedUntilAcknowledgedThenForgotten) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Do(ProcessLaunchFailed{{"a", 0}, absl::NotFoundError("no such binary")});
  auto reports = agent.Sent(v1::WorkerMessage::kRank);
  ASSERT_THAT(reports, ::testing::SizeIs(1));
  EXPECT_EQ(reports[0].rank().state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(reports[0].rank().cause().kind(), v1::CAUSE_KIND_LAUNCH);
  agent.After(absl::Seconds(2));
  reports = agent.Sent(v1::WorkerMessage::kRank);
  ASSERT_THAT(reports, ::testing::SizeIs(1));

  agent.Do(SessionClosed{agent.state.session, "cut"});
  agent.After(absl::Seconds(1));
  EXPECT_EQ(agent.Sent(v1::WorkerMessage::kHello).at(0).hello().ranks_size(), 1);
  agent.Connect();
  const uint64_t sequence = agent.Sent(v1::WorkerMessage::kRank).at(0).sequence();
  agent.AckRank(sequence);
  EXPECT_THAT(agent.state.ranks, IsEmpty());
  agent.After(absl::Seconds(2));
  EXPECT_THAT(agent.Sent(v1::WorkerMessage::kRank), IsEmpty());
}

TEST(Agent, AStepDoneWhileTheCoordinatorWasAwayComesWithTheEnd) {
  Agent agent;
  agent.StartRunning(1, "n1", 0, 0);
  agent.Do(SessionClosed{agent.state.session, "cut"});
  v1::TrainerMessage message;
  message.mutable_report()->set_step(7);
  agent.Do(FromTrainer{1, message});
  EXPECT_THAT(agent.Sent(v1::WorkerMessage::kProgress), IsEmpty());
  agent.After(absl::Seconds(1));
  const auto hello = agent.Sent(v1::WorkerMessage::kHello);
  ASSERT_THAT(hello, ::testing::SizeIs(1));
  EXPECT_EQ(hello[0].hello().ranks(0).last_step().step(), 7);
  agent.Connect();
  EXPECT_EQ(agent.Reported(0).last_step().step(), 7);
  agent.AckRank(agent.Sent(v1::WorkerMessage::kRank).at(0).sequence());
  message.mutable_report()->set_step(8);
  agent.Do(FromTrainer{1, message});  // Progress tells it: no report of its own
  EXPECT_THAT(agent.Sent(v1::WorkerMessage::kRank), IsEmpty());
}

TEST(Agent, ASiblingKilledBeforeItsForkIsNoLaunchFailure) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  agent.Start(1, "a", 1, 1);
  agent.Do(ProcessLaunchFailed{{"a", 0}, absl::NotFoundError("no such binary")});
  EXPECT_THAT(agent.Killed(), ElementsAre(1));
  EXPECT_EQ(agent.Reported(0).cause().kind(), v1::CAUSE_KIND_LAUNCH);
  agent.Do(ProcessLaunchFailed{{"a", 1}, absl::CancelledError("killed before it was started")});
  EXPECT_EQ(agent.Reported(1).state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(agent.Reported(1).cause().kind(), v1::CAUSE_KIND_PEER_FAILURE);
  EXPECT_THAT(agent.Reported(1).cause().message(), HasSubstr("rank 0 failed: no such binary"));
}

TEST(Agent, AnAcknowledgementOfAnOlderReportIsNotOneOfTheNewest) {
  Agent agent;
  agent.Start(1, "a", 0, 0);
  const uint64_t placed = agent.Sent(v1::WorkerMessage::kRank).at(0).sequence();
  agent.Do(ProcessStarted{{"a", 0}, 100});
  agent.AckRank(placed);
  EXPECT_FALSE(agent.state.ranks.at({"a", 0}).acknowledged);
}

TEST(Agent, ASilentCoordinatorIsLeftAndDialledAgain) {
  Agent agent;
  for (int i = 0; i < 4; ++i) agent.After(absl::Seconds(2));
  EXPECT_EQ(agent.state.phase, SessionPhase::kOpen);
  agent.After(absl::Seconds(2));
  EXPECT_THAT(agent.All<CloseSession>(), ::testing::SizeIs(1));
  agent.After(absl::Seconds(5));
  EXPECT_THAT(agent.All<OpenSession>(), ::testing::SizeIs(1));
}

TEST(Agent, AnExitOfItsOwnIsTheCauseThoughAKillWasOnItsWay) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  agent.Do(ProcessExited{{"a", 1}, {.signal = SIGSEGV}, {}});
  ASSERT_THAT(agent.Killed(), ElementsAre(0));
  agent.Do(ProcessExited{{"a", 0}, {.exit_code = 7}, {}});
  EXPECT_EQ(agent.Reported(0).cause().kind(), v1::CAUSE_KIND_EXIT_CODE);
  EXPECT_THAT(agent.Reported(0).cause().message(), HasSubstr("exit code 7"));
}

// A trainer holds itself to its worker's deadline: the node's failure, whoever was first.
TEST(Agent, LeavingAtTheWorkersDeadlineIsTheNodesFailure) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  agent.Finish(0, absl::StatusCode::kAborted);
  agent.Do(ProcessExited{{"a", 0}, {.exit_code = 1}, {}});
  EXPECT_EQ(agent.Reported(0).cause().kind(), v1::CAUSE_KIND_NODE_LOST);

  Agent paused;
  paused.StartRunning(1, "a", 0, 0);
  paused.now = paused.now + absl::Hours(1);
  paused.Do(ProcessExited{{"a", 0}, {.exit_code = 1}, {}});
  EXPECT_THAT(paused.Killed(), ElementsAre(0));
  const v1::RankReport& report = paused.state.ranks.at({"a", 0}).report;
  EXPECT_EQ(report.cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(report.exit_code(), 1);
}

TEST(Agent, ATrainerThatReportsItsEndAndStaysIsKilled) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Finish(0, absl::StatusCode::kOk);
  agent.Do(TrainerClosed{1});
  agent.After(agent.state.timing.kill_bound - absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.After(absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

TEST(Agent, NewestGenerationsAreToldUntilTheJobsLogsAreDeleted) {
  Agent agent;
  agent.state.newest_generation = {{"other", 9}};
  agent.StartRunning(5, "a", 0, 0);
  agent.Stop(5, "a", absl::ZeroDuration());
  agent.Do(JobLogsDeleted{"job"});  // its rank is still known
  agent.Do(SessionClosed{agent.state.session, "cut"});
  agent.After(absl::Seconds(1));
  const v1::Hello hello = agent.Sent(v1::WorkerMessage::kHello).at(0).hello();
  EXPECT_THAT(
      hello.newest_generations(),
      ::testing::UnorderedElementsAre(::testing::Pair("other", 9), ::testing::Pair("job", 5)));
  agent.Connect();
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  agent.Do(ProcessGone{{"a", 0}});
  agent.AckAll();
  ASSERT_THAT(agent.state.ranks, IsEmpty());
  agent.Do(JobLogsDeleted{"job"});
  agent.Do(JobLogsDeleted{"other"});
  EXPECT_THAT(agent.state.newest_generation, IsEmpty());
  EXPECT_THAT(agent.state.stopped_generation, IsEmpty());
}

TEST(Agent, ShutdownKillsAndWaitsForProofAndAcknowledgement) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Do(Shutdown{});
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  agent.Do(ProcessGone{{"a", 0}});
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());
  agent.AckRank(agent.Sent(v1::WorkerMessage::kRank).at(0).sequence());
  EXPECT_THAT(agent.All<ShutdownComplete>(), ::testing::SizeIs(1));
}

TEST(Agent, NamesThatCouldEscapeAFolderAreRefused) {
  Agent agent;
  agent.Start(1, "../../etc", 0, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_THAT(agent.Reported(0).cause().message(), HasSubstr("job id and nonce"));
}

TEST(Agent, TheSameEventsGiveTheSameDecisions) {
  Agent a, b;
  for (Agent* agent : {&a, &b}) {
    for (int rank = 0; rank < 4; ++rank) agent->StartRunning(1, "n", rank, rank);
    agent->Do(ProcessExited{{"n", 2}, {.exit_code = 3}, {}});
  }
  ASSERT_EQ(a.actions.size(), b.actions.size());
  EXPECT_EQ(a.Killed(), b.Killed());
  EXPECT_EQ(a.Reported(2).SerializeAsString(), b.Reported(2).SerializeAsString());
}

}  // namespace
}  // namespace upipe::worker
