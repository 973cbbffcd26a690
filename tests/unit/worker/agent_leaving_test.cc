// Notices, grace and SIGTERM: how ranks and their worker leave.
#include <csignal>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/worker/agent_driver.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Agent, ANoticeAsksTheTrainerAndKillsAfterTheGrace) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Stop(1, "a", absl::Seconds(5));
  EXPECT_THAT(agent.Killed(), IsEmpty());
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<SendToTrainer>()[0].command.stop().reason(), "cancelled");
  agent.Stop(1, "a", absl::Seconds(9));  // repeated: asked once, and the earlier bound stays
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  EXPECT_EQ(NextWake(agent.state, agent.now),
            agent.now + absl::Seconds(2));  // a heartbeat comes first
  agent.After(absl::Milliseconds(4999));
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.After(absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  EXPECT_EQ(agent.Reported(0).cause().kind(), v1::CAUSE_KIND_USER);
  EXPECT_THAT(agent.Reported(0).cause().message(),
              HasSubstr("cancelled; it did not leave within the grace"));
  EXPECT_FALSE(agent.Reported(0).stopped_on_notice());
}

TEST(Agent, AShorterGraceCountsFromItsOwnOrder) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Stop(1, "a", absl::Seconds(600));
  agent.now = agent.now + absl::Seconds(1);
  agent.Stop(1, "a", absl::Seconds(2));
  agent.After(absl::Milliseconds(1999));
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.After(absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

TEST(Agent, WhatHasNotBegunToTrainEndsAtOnceOnNotice) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Start(1, "a", 1, 1);  // forked, not attached
  agent.Do(ProcessStarted{{"a", 1}, 101});
  agent.Start(1, "a", 2, 2);  // ready, perhaps restoring
  agent.Do(ProcessStarted{{"a", 2}, 102});
  agent.Attach(1, "a", 2, 102, 3);
  v1::TrainerMessage ready;
  ready.mutable_ready();
  agent.Do(FromTrainer{3, ready});
  agent.Stop(1, "a", absl::Seconds(60));
  EXPECT_THAT(agent.Killed(), ElementsAre(1, 2));
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<SendToTrainer>()[0].connection, 1u);
}

// The notice may have been given to another worker's ranks: the gang leaves together.
TEST(Agent, AGangThatLeavesOnNoticeLeavesEachRankAlone) {
  for (const bool told_here : {true, false}) {
    Agent agent;
    for (int rank = 0; rank < 3; ++rank) agent.StartRunning(1, "a", rank, rank);
    if (told_here) agent.Stop(1, "a", absl::Seconds(60));
    for (int rank = 0; rank < 2; ++rank) {
      agent.Finish(rank, absl::StatusCode::kCancelled);
      agent.Do(ProcessExited{{"a", rank}, {.exit_code = 1}, {}});
      EXPECT_THAT(agent.Killed(), IsEmpty());
      EXPECT_TRUE(agent.Reported(rank).stopped_on_notice());
      EXPECT_EQ(agent.Reported(rank).exit_code(), 1);
      EXPECT_FALSE(agent.Reported(rank).has_cause());
      ASSERT_THAT(agent.All<RecordExit>(), ::testing::SizeIs(1));
      EXPECT_EQ(agent.All<RecordExit>()[0].outcome, RankOutcome::kLeftOnNotice);
    }
    agent.Do(ProcessExited{{"a", 2}, {.signal = SIGSEGV}, {}});
    EXPECT_EQ(agent.Reported(2).cause().kind(), v1::CAUSE_KIND_SIGNAL);
    EXPECT_FALSE(agent.Reported(2).stopped_on_notice());
  }
}

TEST(Agent, AfterANoticeACrashIsACrashAndTakesTheSiblings) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  agent.Stop(1, "a", absl::Seconds(60));
  agent.Do(ProcessExited{{"a", 1}, {.exit_code = 3}, {}});
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  EXPECT_EQ(agent.Reported(1).cause().kind(), v1::CAUSE_KIND_EXIT_CODE);
}

TEST(Agent, AnEmptyWorkerLeavesOnceTheCoordinatorKnows) {
  Agent agent;
  agent.now = agent.now + absl::Milliseconds(1);
  agent.Do(Leave{});
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());  // a start may be on its way
  const auto heartbeats = agent.Sent(v1::WorkerMessage::kHeartbeat);
  ASSERT_THAT(heartbeats, ::testing::SizeIs(1));
  EXPECT_TRUE(heartbeats[0].heartbeat().leaving());
  agent.Start(1, "a", 0, 0);
  EXPECT_THAT(agent.All<LaunchRank>(), IsEmpty());
  EXPECT_THAT(agent.Reported(0).cause().message(), HasSubstr("the worker is leaving"));
  const uint64_t refusal = agent.Sent(v1::WorkerMessage::kRank).at(0).sequence();
  agent.AckHeartbeat(heartbeats[0].sequence());
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());
  agent.AckRank(refusal);
  EXPECT_THAT(agent.All<ShutdownComplete>(), ::testing::SizeIs(1));

  Agent alone;
  alone.Do(SessionClosed{alone.state.session, "cut"});
  alone.Do(Leave{});
  EXPECT_THAT(alone.All<ShutdownComplete>(), ::testing::SizeIs(1));
}

TEST(Agent, LeavingWaitsForTheCoordinatorToStopTheRanks) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Start(1, "b", 1, 1);  // refused: under another nonce
  agent.AckAll();
  agent.Do(Leave{});
  agent.AckAll();
  EXPECT_THAT(agent.Killed(), IsEmpty());
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  for (int i = 0; i < 30; ++i) {  // it answers: the worker is patient
    agent.After(absl::Seconds(2));
    EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
    agent.AckAll();
  }
  agent.Stop(1, "a", absl::Seconds(100));
  EXPECT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  agent.Finish(0, absl::StatusCode::kCancelled);
  agent.Do(ProcessExited{{"a", 0}, {.exit_code = 1}, {}});
  agent.AckAll();
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());
  agent.Do(ProcessGone{{"a", 0}});
  EXPECT_THAT(agent.All<ShutdownComplete>(), IsEmpty());
  agent.AckAll();
  EXPECT_THAT(agent.All<ShutdownComplete>(), ::testing::SizeIs(1));
}

TEST(Agent, LeavingWithoutACoordinatorAsksTheRanksItselfAndKillsAtTheBound) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.state.timing.autonomy = absl::Hours(1);
  agent.state.leave_grace = absl::Seconds(60);
  agent.Do(SessionClosed{agent.state.session, "cut"});
  const BootTime told = agent.now;
  agent.Do(Leave{});
  agent.now = told + (agent.state.timing.kill_bound - absl::Milliseconds(1));
  agent.Do(Tick{});
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  EXPECT_LE(NextWake(agent.state, agent.now), told + agent.state.timing.kill_bound);
  agent.After(absl::Milliseconds(1));
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_TRUE(agent.All<SendToTrainer>()[0].command.has_stop());
  agent.now = told + (absl::Seconds(60) - absl::Milliseconds(1));
  agent.Do(Tick{});
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.After(absl::Milliseconds(1));
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGKILL}, {}});
  agent.Do(ProcessGone{{"a", 0}});
  EXPECT_THAT(agent.All<ShutdownComplete>(), ::testing::SizeIs(1));  // nobody to tell
}

TEST(Agent, ASecondSignalKillsWhatStillLeaves) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Do(Leave{});
  EXPECT_THAT(agent.Killed(), IsEmpty());
  agent.Do(Shutdown{});
  EXPECT_THAT(agent.Killed(), ElementsAre(0));
}

}  // namespace
}  // namespace upipe::worker
