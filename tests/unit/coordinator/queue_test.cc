// Who is placed next, who waits, and why.
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Queue : public Scene {
 protected:
  void Queued(const std::string& id, int ranks, int priority = 0) {
    v1::JobSpec spec = SpecOf(ranks);
    spec.set_priority(priority);
    SubmitSpec(spec, id);
    Plan(ranks, id);
  }
  void Hold(const std::string& id) { core_.Do(HoldReceived{next_call_++, id}); }
  void Release(const std::string& id) { core_.Do(ReleaseReceived{next_call_++, id}); }
};

TEST_F(Queue, HigherPriorityIsFirstEqualOnesAsTheyCame) {
  Workers();
  Queued("running", 4);
  Queued("low", 4, -5);
  Queued("first", 4);
  Queued("second", 4);
  Queued("urgent", 4, 7);
  EXPECT_EQ(WhyOf("urgent").position(), 1);
  EXPECT_EQ(WhyOf("urgent").reason(), v1::WAIT_REASON_BUSY_SLOTS);
  EXPECT_EQ(WhyOf("first").position(), 2);
  EXPECT_EQ(WhyOf("first").reason(), v1::WAIT_REASON_BEHIND);
  EXPECT_EQ(WhyOf("first").message(), "behind urgent");
  EXPECT_EQ(WhyOf("second").position(), 3);
  EXPECT_EQ(WhyOf("low").position(), 4);
  core_.Restart();
  EXPECT_EQ(core_.state().queue.begin()->second, "urgent");
}

TEST_F(Queue, SlotsAreKeptForTheHead) {
  Workers();
  Queued("running", 2);
  Queued("head", 4);
  Queued("small", 1);
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_QUEUED);
  for (int r = 0; r < 2; ++r)
    Tell([&] {
      v1::RankReport report = ReportOf(r, v1::RANK_STATE_GONE, "running");
      report.set_exit_code(3);
      return report;
    }());
  EXPECT_EQ(core_.JobStateOf("head"), v1::JOB_STATE_STARTING);
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_QUEUED);
}

TEST_F(Queue, JobsThatWaitForWorkersHoldOrBackoffStandInNobodysWay) {
  Workers();
  Queued("large", 4);
  Cancel("large");
  for (int r = 0; r < 4; ++r) Tell(ReportOf(r, v1::RANK_STATE_GONE, "large"));
  core_.Do(CordonReceived{next_call_++, "b", "broken fan"});
  Queued("cordoned", 4);
  EXPECT_EQ(WhyOf("cordoned").reason(), v1::WAIT_REASON_CORDONED);
  EXPECT_THAT(WhyOf("cordoned").message(), AllOf(HasSubstr("needs 4"), HasSubstr("2 belong to")));
  Queued("small", 1);
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_STARTING);
}

TEST_F(Queue, AHeldJobIsNotPlacedUntilItIsReleased) {
  Workers();
  core_.Do(SubmitReceived{next_call_++, "j", "request-j", SpecOf(4), true});
  Plan(4);
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(GetJob(core_.state(), "j")->shown_state(), "HELD");
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_HELD);
  Queued("next", 4);
  EXPECT_EQ(core_.JobStateOf("next"), v1::JOB_STATE_STARTING);
  Queued("waiting", 4);
  EXPECT_EQ(WhyOf("j").position(), 0);
  EXPECT_EQ(WhyOf("waiting").position(), 1);  // the held one is not in front of it
  core_.Restart();
  EXPECT_TRUE(core_.job("j").record.held());
  Cancel("next");
  Release("j");
  EXPECT_FALSE(core_.job("j").record.held());
  EXPECT_EQ((*core_.Last<ReplyJob>().at(0).job)->id(), "j");
}

TEST_F(Queue, ARunningJobIsHeldWhenItIsQueuedAgain) {
  RunDurable();
  Hold("j");
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  FailOnce();
  PlaceAgain();
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_HELD);
  Release("j");
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(Queue, HoldIsIdempotentAndRefusesJobsThatEnded) {
  Workers();
  Queued("j", 4);
  Hold("j");
  const int events = core_.job("j").record.events_size();
  Hold("j");
  EXPECT_EQ(core_.job("j").record.events_size(), events);
  Hold("nobody");
  EXPECT_EQ(core_.Last<ReplyJob>().at(0).job.status().code(), absl::StatusCode::kNotFound);
  Cancel("j");
  for (int r = 0; r < 4; ++r) Tell(Killed(r, v1::RANK_STATE_GONE));
  Hold("j");
  EXPECT_EQ(core_.Last<ReplyJob>().at(0).job.status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(Queue, AfterARestartTheHeadWaitsForWorkersThatAreAboutToReturn) {
  Workers();
  Queued("running", 4);
  Queued("large", 4);
  Queued("small", 1);
  Cancel("running");
  core_.Restart();
  core_.Do(HelloReceived{11, HelloOf("a", 2, "i2")});
  EXPECT_EQ(WhyOf("large").reason(), v1::WAIT_REASON_SETTLING);
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_QUEUED);
  core_.Advance(core_.state().timing.settle);
  core_.Do(HeartbeatReceived{11, 1});
  core_.Do(Tick{});
  EXPECT_EQ(WhyOf("large").reason(), v1::WAIT_REASON_SILENT_WORKERS);
  EXPECT_EQ(core_.JobStateOf("small"), v1::JOB_STATE_STARTING);
}

TEST_F(Queue, AJobThatRanWaitsForReplacementsForAsLongAsItTakes) {
  RunDurable();
  FailOnce();
  core_.Do(SessionClosed{2});
  core_.Do(FenceNodeReceived{next_call_++, "b"});
  core_.Do(ForgetNodeReceived{next_call_++, "b"});
  core_.Advance(2 * core_.state().timing.start_deadline);
  core_.Do(HeartbeatReceived{1, 1});
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_TOO_FEW_SLOTS);
  core_.Do(HelloReceived{3, HelloOf("c", 2)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(Queue, WhyTellsOfEveryState) {
  Workers();
  Submit(4);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_PLANNING);
  Plan(4);
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_STARTING);
  Meet();
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_RUNNING);
  EXPECT_EQ(WhyOf().position(), 0);
  Tell(Exit(2, v1::RANK_STATE_EXITED, 3));
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_STOPPING);
  EXPECT_THAT(WhyOf().message(), HasSubstr("gone on a, b"));
  GangGone();
  EXPECT_EQ(WhyOf().reason(), v1::WAIT_REASON_ENDED);
  EXPECT_EQ(Why(core_.state(), "nobody", core_.now()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace upipe::coordinator
