// Stalls with their culprit, and time limits.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

class Deadlines : public Scene {
 protected:
  struct At {
    int64_t collective;
    bool inside = true;
    double seconds = 40;
    const char* pass = "forward";
  };
  // A heartbeat of every worker with the positions of the four ranks.
  void Positions(const std::vector<At>& ranks) {
    const v1::AttemptRecord& attempt = core_.job("j").attempt->record;
    for (const char* worker : {"a", "b"}) {
      HeartbeatReceived event{core_.state().nodes.at(worker).session, 1};
      v1::AttemptPositions& positions = *event.heartbeat.add_attempts();
      positions.mutable_fence()->set_job_id("j");
      positions.mutable_fence()->set_generation(attempt.generation());
      positions.mutable_fence()->set_nonce(attempt.nonce());
      for (int r = 0; r < attempt.ranks_size(); ++r) {
        if (attempt.ranks(r).worker() != worker || r >= static_cast<int>(ranks.size())) continue;
        v1::RankPosition& position = *positions.add_ranks();
        position.set_rank(r);
        position.set_collective(ranks[r].collective);
        position.set_in_collective(ranks[r].inside);
        position.set_seconds_in_place(ranks[r].seconds);
        position.set_pass(ranks[r].pass);
      }
      core_.Do(event);
    }
    core_.Do(Tick{});
  }
};

TEST_F(Deadlines, ARankThatStandsStillIsNamedByTheLowestCollective) {
  RunDurable();
  Positions({{8}, {8}, {7, false}, {8}});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_STALL);
  EXPECT_EQ(cause().rank(), 2);
  EXPECT_EQ(cause().node(), "b");
  EXPECT_THAT(cause().evidence(), HasSubstr("rank 3"));
  EXPECT_EQ(core_.state().tally.stalls, 1);
  // What the kill leaves behind explains nothing better.
  v1::RankReport killed = ReportOf(2, v1::RANK_STATE_EXITED);
  killed.set_signal(9);
  Tell(killed);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_STALL);
  GangGone();
  EXPECT_EQ(core_.job("j").record.restarts().application(), 1);
}

TEST_F(Deadlines, APositionIsShownWhileItsRankRuns) {
  RunDurable();
  Positions({{8}, {8}, {7, false, 1}, {8}});
  const v1::Job running = *GetJob(core_.state(), "j");
  ASSERT_EQ(running.ranks_size(), 4);
  EXPECT_EQ(running.ranks(2).position().collective(), 7);
  v1::RankReport killed = ReportOf(2, v1::RANK_STATE_EXITED);
  killed.set_signal(9);
  Tell(killed);
  EXPECT_FALSE(GetJob(core_.state(), "j")->ranks(2).has_position());
  EXPECT_FALSE(ListJobs(core_.state(), {})->jobs(0).ranks(3).has_position());
}

TEST_F(Deadlines, EqualNumbersMeanTheCommunicator) {
  RunDurable();
  Positions({{8}, {8}, {8}, {8}});
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_STALL);
  EXPECT_FALSE(cause().has_rank());
  EXPECT_THAT(cause().message(), HasSubstr("communicator"));
}

TEST_F(Deadlines, OneRankThatMovesIsEnough) {
  RunDurable();
  Positions({{8}, {8}, {7, false, 29.9}, {8}});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
}

TEST_F(Deadlines, SilenceIsNoStall) {
  RunDurable();
  Positions({{8}, {8}, {8, true, 10}, {8, true, 10}});
  core_.Advance(core_.state().timing.SuspectAfter());
  Positions({{8}, {8}});  // of b's ranks nothing is known any more
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
}

TEST_F(Deadlines, RanksThatAreThroughDoNotCount) {
  RunDurable();
  v1::RankReport done = Exit(3, v1::RANK_STATE_EXITED, 0);
  done.mutable_last_step()->set_step(10);
  Tell(done);
  Positions({{8}, {8}, {7, false}});
  EXPECT_EQ(cause().rank(), 2);
}

TEST_F(Deadlines, CheckpointsHaveADeadlineOfTheirOwn) {
  Workers();
  SubmitSpec(Durable("/checkpoints"));
  v1::PlanResult plan = PlanOf(4);
  v1::TagBytes& tag = *plan.mutable_plan()->mutable_ranks(0)->mutable_host_memory()->add_tags();
  tag.set_tag("checkpoint");
  tag.set_peak_bytes(2'000'000'000);  // 20 s
  core_.Do(PlanFinished{"j", plan});
  Meet();
  Positions({{8}, {8}, {7, false, 49, "checkpoint"}, {8}});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  Positions({{8, true, 51}, {8, true, 51}, {7, false, 51, "checkpoint"}, {8, true, 51}});
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_STALL);
}

TEST_F(Deadlines, TheTimeLimitCountsOverAllAttempts) {
  Workers();
  v1::JobSpec spec = Durable("/checkpoints");
  spec.set_time_limit_seconds(100);
  SubmitSpec(spec);
  Plan(4);
  Meet();
  core_.Advance(absl::Seconds(60));
  Heartbeats();
  FailOnce();
  EXPECT_EQ(core_.job("j").record.used_millis(), 60'000);
  core_.Advance(absl::Minutes(30));  // in the queue
  Heartbeats();
  core_.Do(Tick{});
  Meet();
  core_.Advance(absl::Seconds(39));
  Heartbeats();
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Restart();
  EXPECT_EQ(core_.now().boot - core_.job("j").attempt->placed_at, absl::Seconds(39));
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_TIME_LIMIT);
}

TEST_F(Deadlines, AtTheLimitTheJobLeavesWithGraceAndFails) {
  Workers();
  v1::JobSpec spec = Durable("/checkpoints");
  spec.set_time_limit_seconds(100);
  SubmitSpec(spec);
  Plan(4);
  Meet();
  core_.Advance(absl::Seconds(99));
  Heartbeats();
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_TIME_LIMIT);
  EXPECT_GT(core_.Sent(1, v1::CoordinatorMessage::kStop).at(0).stop().grace_millis(), 0);
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_TIME_LIMIT);
}

TEST_F(Deadlines, AStartThatRestoresGetsTheTimeForIt) {
  Workers();
  SubmitSpec(Durable("/checkpoints"));
  v1::PlanResult plan = PlanOf(4);
  v1::TagBytes& tag = *plan.mutable_plan()->mutable_ranks(0)->mutable_host_memory()->add_tags();
  tag.set_tag("checkpoint");
  tag.set_peak_bytes(2'000'000'000);
  core_.Do(PlanFinished{"j", plan});
  core_.Advance(core_.state().timing.start_deadline + absl::Seconds(19));
  Heartbeats();
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  core_.Advance(absl::Seconds(1));
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STOPPING);
}

}  // namespace
}  // namespace upipe::coordinator
