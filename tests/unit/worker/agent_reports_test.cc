// What passes through the worker between trainers and coordinator: checkpoints and positions.
#include <csignal>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/worker/agent_driver.h"
#include "worker/agent/reporting.h"

namespace upipe::worker {
namespace {

using ::testing::IsEmpty;

TEST(Agent, SlotsAreCountedByWhatTheyAre) {
  Agent agent;  // four slots
  agent.state.identity.add_devices()->set_sick("too hot");
  agent.state.identity.add_devices();
  EXPECT_EQ(CountSlots(agent.state), (SlotCounts{.free = 3, .sick = 1}));
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  EXPECT_EQ(CountSlots(agent.state), (SlotCounts{.free = 2, .taken = 2}));
  agent.state.ranks.at({"a", 1}).report.set_quarantined(true);
  EXPECT_EQ(CountSlots(agent.state), (SlotCounts{.free = 2, .taken = 1, .quarantined = 1}));
  agent.Do(ProcessGone{{"a", 0}});
  EXPECT_EQ(CountSlots(agent.state), (SlotCounts{.free = 2, .quarantined = 1, .sick = 1}));
}

TEST(Agent, TheResumePointTravelsBothWays) {
  Agent agent;
  agent.Start(2, "a", 0, 0);
  agent.Do(ProcessStarted{{"a", 0}, 100});
  agent.Attach(2, "a", 0, 100, 1);
  v1::TrainerMessage ready;
  ready.mutable_ready()->mutable_resume()->set_step(40);
  ready.mutable_ready()->mutable_resume()->set_generation(1);
  ready.mutable_ready()->add_passed_over()->set_step(50);
  agent.Do(FromTrainer{1, ready});
  EXPECT_EQ(agent.Reported(0).resume().step(), 40);
  ASSERT_EQ(agent.Reported(0).problems_size(), 1);
  EXPECT_EQ(agent.Reported(0).problems(0).step(), 50);
  v1::CoordinatorMessage message;
  *message.mutable_peers()->mutable_fence() = agent.FenceOf(2, "a");
  message.mutable_peers()->mutable_resume()->set_step(30);  // the coordinator decides
  agent.FromCoordinatorMessage(message);
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<SendToTrainer>()[0].command.peers().resume().step(), 30);
}

TEST(Agent, ACommitIsReportedUntilAcknowledgedAlsoAfterTheExit) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.AckAll();
  v1::TrainerMessage message;
  message.mutable_committed()->set_step(10);
  agent.Do(FromTrainer{1, message});
  EXPECT_EQ(agent.Reported(0).last_commit().step(), 10);
  EXPECT_EQ(agent.All<RecordCheckpoint>().at(0).committed.step(), 10);
  agent.After(absl::Seconds(2));
  EXPECT_EQ(agent.Reported(0).last_commit().step(), 10);
  agent.AckAll();
  agent.After(absl::Seconds(2));
  EXPECT_THAT(agent.Sent(v1::WorkerMessage::kRank), IsEmpty());
  agent.Do(ProcessExited{{"a", 0}, {.signal = SIGSEGV}, {}});
  message.mutable_committed()->set_step(20);
  agent.Do(FromTrainer{1, message});
  EXPECT_EQ(agent.Reported(0).last_commit().step(), 20);
  EXPECT_EQ(agent.Reported(0).state(), v1::RANK_STATE_EXITED);
}

TEST(Agent, ATimelineIsKeptAsTheRanksOwn) {
  Agent agent;
  agent.StartRunning(3, "a", 1, 0);
  v1::TrainerMessage message;
  message.mutable_timeline()->set_step(10);
  message.mutable_timeline()->set_rank(7);
  agent.Do(FromTrainer{2, message});
  ASSERT_EQ(agent.All<RecordTimeline>().size(), 1u);
  const RecordTimeline action = agent.All<RecordTimeline>()[0];
  EXPECT_EQ(action.key, (RankKey{"a", 1}));
  EXPECT_EQ(action.timeline.step(), 10);
  EXPECT_EQ(action.timeline.rank(), 1);
  EXPECT_EQ(action.timeline.generation(), 3);
  message.mutable_timeline()->add_stages(std::string(5 << 20, 'x'));
  agent.Do(FromTrainer{2, message});
  EXPECT_THAT(agent.All<RecordTimeline>(), IsEmpty());
  EXPECT_EQ(agent.All<CloseTrainer>().size(), 1u);
}

TEST(Agent, ProblemsAreTheNewestFewAndShort) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  v1::TrainerMessage message;
  for (int step = 1; step <= 20; ++step) {
    message.mutable_problem()->set_step(step);
    message.mutable_problem()->set_message(std::string(10000, 'x'));
    agent.Do(FromTrainer{1, message});
  }
  const v1::RankReport report = agent.Reported(0);
  ASSERT_EQ(report.problems_size(), 8);
  EXPECT_EQ(report.problems(0).step(), 13);
  EXPECT_EQ(report.problems(7).step(), 20);
  EXPECT_LE(report.ByteSizeLong(), 8u * 600 + 1000);
}

TEST(Agent, RetentionOrdersReachTheLiveRankZeroOnly) {
  Agent agent;
  agent.StartRunning(3, "a", 0, 0);
  agent.StartRunning(3, "a", 1, 1);
  v1::CoordinatorMessage message;
  v1::RetainCheckpoints& retain = *message.mutable_retain();
  *retain.mutable_fence() = agent.FenceOf(3, "a");
  retain.set_keep(2);
  agent.FromCoordinatorMessage(message);
  ASSERT_THAT(agent.All<SendToTrainer>(), ::testing::SizeIs(1));
  EXPECT_EQ(agent.All<SendToTrainer>()[0].connection, 1u);
  EXPECT_EQ(agent.All<SendToTrainer>()[0].command.retain().keep(), 2);
  *retain.mutable_fence() = agent.FenceOf(2, "older");
  agent.FromCoordinatorMessage(message);
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
  *retain.mutable_fence() = agent.FenceOf(3, "a", /*epoch=*/0);
  agent.FromCoordinatorMessage(message);
  EXPECT_THAT(agent.All<SendToTrainer>(), IsEmpty());
}

TEST(Agent, EveryHeartbeatSaysWhereLiveRanksAreAndForHowLong) {
  Agent agent;
  EXPECT_FALSE(PositionsDue(agent.state, agent.now));  // nobody to look at
  agent.StartRunning(1, "a", 0, 0);
  agent.StartRunning(1, "a", 1, 1);
  agent.Look({At(0, 5), At(1, 6)});
  agent.now = agent.now + absl::Seconds(2);
  v1::Heartbeat heartbeat = agent.Look({At(0, 5), At(1, 7)});
  ASSERT_EQ(heartbeat.attempts_size(), 1);
  EXPECT_EQ(heartbeat.attempts(0).fence().job_id(), "job");
  EXPECT_EQ(heartbeat.attempts(0).fence().epoch(), 0);
  ASSERT_EQ(heartbeat.attempts(0).ranks_size(), 2);
  EXPECT_EQ(heartbeat.attempts(0).ranks(0).seconds_in_place(), 2);
  EXPECT_EQ(heartbeat.attempts(0).ranks(1).seconds_in_place(), 0);
  EXPECT_EQ(heartbeat.attempts(0).ranks(1).collective(), 7);
  EXPECT_FALSE(PositionsDue(agent.state, agent.now));
  // A machine that was paused did not run its ranks either.
  agent.now = agent.now + absl::Seconds(100);
  agent.Look({At(0, 5), At(1, 7)});
  EXPECT_EQ(agent.state.ranks.at({"a", 0}).in_place, absl::Seconds(6));
  // One that has exited is not live.
  agent.After(absl::Seconds(1));  // it was silent for too long, and is dialled again
  agent.Connect();
  agent.Do(ProcessExited{{"a", 1}, {.exit_code = 0}, {}});
  agent.now = agent.now + absl::Seconds(2);
  heartbeat = agent.Look({At(0, 8), At(1, 7)});
  ASSERT_EQ(heartbeat.attempts(0).ranks_size(), 1);
  EXPECT_EQ(heartbeat.attempts(0).ranks(0).rank(), 0);
}

TEST(Agent, PositionsAreReadWithoutASessionToo) {
  Agent agent;
  agent.StartRunning(1, "a", 0, 0);
  agent.Do(SessionClosed{agent.state.session, "cut"});
  for (int i = 0; i < 3; ++i) {
    agent.now = agent.now + absl::Seconds(2);
    ASSERT_TRUE(PositionsDue(agent.state, agent.now));
    agent.Do(PositionsRead{{{"a", {At(0, 5)}}}});
  }
  EXPECT_EQ(agent.state.ranks.at({"a", 0}).in_place, absl::Seconds(4));
}

TEST(Agent, DevicesAreInEveryHeartbeatAndASickOneIsToldAtOnce) {
  Agent agent;
  std::vector<v1::SlotDevice> devices(2);
  devices[0].set_uuid("GPU-a");
  agent.state.identity.mutable_devices()->Assign(devices.begin(), devices.end());
  agent.After(absl::Seconds(2));
  ASSERT_EQ(agent.Sent(v1::WorkerMessage::kHeartbeat).size(), 1u);
  EXPECT_EQ(agent.Sent(v1::WorkerMessage::kHeartbeat)[0].heartbeat().devices(0).uuid(), "GPU-a");
  devices[1].set_sick("XID 79");
  agent.now = agent.now + absl::Milliseconds(1);
  agent.Do(DevicesRead{devices});
  ASSERT_EQ(agent.Sent(v1::WorkerMessage::kHeartbeat).size(), 1u);
  EXPECT_EQ(agent.Sent(v1::WorkerMessage::kHeartbeat)[0].heartbeat().devices(1).sick(), "XID 79");
  ASSERT_EQ(agent.All<NodeEvent>().size(), 1u);
  EXPECT_EQ(agent.All<NodeEvent>()[0].text, "the device of slot 1 is sick: XID 79");
  devices[1].clear_sick();
  agent.Do(DevicesRead{devices});
  EXPECT_EQ(agent.All<NodeEvent>().at(0).text, "the device of slot 1 is well again");
}

}  // namespace
}  // namespace upipe::worker
