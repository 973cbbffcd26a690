// A plan that fell short of what a worker's libraries take is made once more, with what was
// measured: charged to nobody, durable, and not a second time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

class PlanAgain : public Scene {
 protected:
  // Rank `rank` leaves before step 1, as the worker tells it.
  v1::RankReport FellShort(int rank) {
    v1::RankReport report = Exit(rank, v1::RANK_STATE_EXITED, 1);
    report.mutable_cause()->set_kind(v1::CAUSE_KIND_EXIT_CODE);
    report.mutable_cause()->set_message("attention_bwd takes 9 bytes of scratch, 5 are planned");
    report.mutable_measured()->set_libraries("cuDNN 9.25.0");
    v1::MeasuredWorkspaces::Op& op = *report.mutable_measured()->add_ops();
    op.set_op("attention_bwd");
    op.set_counted_bytes(5);
    op.set_measured_bytes(9);
    return report;
  }
  // The planner's answer, with what it was given.
  v1::PlanResult Again(int64_t bytes) {
    v1::PlanResult result = PlanOf(4, bytes);
    *result.mutable_plan()->mutable_measured() = core_.job("j").record.measured();
    result.mutable_plan()->set_plan_hash(78);
    return result;
  }
  void StartPlanned(const std::string& path = "") {
    Workers();
    SubmitSpec(Durable(path));
    Plan(4);
    ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  }
};

TEST_F(PlanAgain, TheJobIsPlannedOnceMoreAndPlacedAtOnce) {
  StartPlanned();
  Tell(FellShort(2));
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_REQUEUE);
  Tell(FellShort(1));  // of the same attempt
  GangGone();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_PLANNING);
  const auto planners = core_.Last<StartPlanner>();
  ASSERT_THAT(planners, SizeIs(1));
  ASSERT_NE(planners[0].earlier, nullptr);
  EXPECT_EQ(planners[0].earlier->plan_hash(), 77u) << "the plan that fell short";
  EXPECT_EQ(planners[0].earlier->measured().ops(0).measured_bytes(), 9);
  EXPECT_EQ(planners[0].spec.parallel().ranks(), 4);
  core_.Do(PlanFinished{"j", Again(150)});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING) << "no back-off";
  EXPECT_EQ(core_.job("j").record.generation(), 2);
  EXPECT_EQ(core_.job("j").plan->plan_hash(), 78u);
  bool told = false;
  for (const v1::JobEvent& event : core_.job("j").record.events()) {
    told = told || event.message() == "planned once more: 150 B per rank, 100 B before";
  }
  EXPECT_TRUE(told);
}

TEST_F(PlanAgain, NobodyIsCharged) {
  StartPlanned();
  Tell(FellShort(2));
  GangGone();
  const v1::JobRecord& record = core_.job("j").record;
  EXPECT_EQ(record.restarts().application(), 0);
  EXPECT_EQ(record.restarts().infrastructure(), 0);
  EXPECT_EQ(record.restarts().no_progress(), 0);
  EXPECT_EQ(record.attempts(0).cause().message(),
            "attention_bwd takes 9 bytes of scratch, 5 are planned");
  EXPECT_EQ(core_.state().tally.restarts.at({v1::CAUSE_KIND_EXIT_CODE, "none"}), 1);
}

// A peer's end that came first, as when a worker kills the siblings.
TEST_F(PlanAgain, ItExplainsPeersThatWentFirst) {
  StartPlanned();
  v1::RankReport peer = Exit(0, v1::RANK_STATE_EXITED, 1);
  peer.mutable_cause()->set_kind(v1::CAUSE_KIND_PEER_FAILURE);
  Tell(peer);
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_RESTART);
  Tell(FellShort(2));
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_REQUEUE);
  GangGone();
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_PLANNING);
  EXPECT_EQ(core_.job("j").record.restarts().infrastructure(), 0);
}

TEST_F(PlanAgain, ASecondTimeTheJobFailsNamingBothNumbers) {
  StartPlanned();
  Tell(FellShort(2));
  GangGone();
  core_.Do(PlanFinished{"j", Again(150)});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  Tell(FellShort(3));
  EXPECT_EQ(core_.job("j").record.intent(), v1::STOP_INTENT_FAIL);
  GangGone();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("takes 9 bytes of scratch, 5 are planned"),
                                       HasSubstr("planned once more before")));
}

TEST_F(PlanAgain, ANewPlanThatDoesNotFitFailsTheJobWithItsSentence) {
  StartPlanned();
  Tell(FellShort(2));
  GangGone();
  v1::PlanResult refused;
  refused.mutable_refusal()->set_message("rank 1 takes 2.0 GiB, 1.0 GiB are there");
  core_.Do(PlanFinished{"j", refused});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(cause().kind(), v1::CAUSE_KIND_PLAN_REFUSED);
  EXPECT_THAT(cause().message(), AllOf(HasSubstr("planned once more"),
                                       HasSubstr("rank 1 takes 2.0 GiB, 1.0 GiB are there")));
}

// The measurement is durable before anything follows from it, and so is the second plan.
TEST_F(PlanAgain, ACoordinatorThatDiesPlansOnceMoreAllTheSame) {
  StartPlanned();
  Tell(FellShort(2));
  GangGone();
  core_.Restart();
  Workers();
  core_.Do(Tick{});
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_PLANNING);
  EXPECT_TRUE(core_.job("j").planner_running);
  core_.Do(PlanFinished{"j", Again(150)});
  core_.Restart();
  ASSERT_NE(core_.job("j").plan, nullptr);
  EXPECT_EQ(core_.job("j").plan->plan_hash(), 78u);
  EXPECT_EQ(core_.job("j").plan->measured().ops_size(), 1);
}

// A library that was changed between two generations: what was checkpointed goes on.
TEST_F(PlanAgain, ALaterGenerationGoesOnFromItsCheckpoint) {
  RunDurable("/root");
  Commit(4);
  FailOnce();
  PlaceAgain();
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  Tell(FellShort(1));
  GangGone();
  core_.Do(PlanFinished{"j", Again(150)});
  ASSERT_EQ(core_.job("j").record.generation(), 3);
  EXPECT_EQ(core_.job("j").record.last_commit().step(), 4);
  EXPECT_EQ(core_.job("j").record.restarts().application(), 1);
}

TEST_F(PlanAgain, ItMayBeCancelledMeanwhile) {
  StartPlanned();
  Tell(FellShort(2));
  GangGone();
  EXPECT_EQ(Cancel(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(core_.Last<KillPlanner>(), SizeIs(1));
}

TEST_F(PlanAgain, WhatIsFarTooLongClosesTheSession) {
  StartPlanned();
  v1::RankReport report = FellShort(2);
  report.mutable_measured()->set_libraries(std::string(33 << 10, 'x'));
  Tell(report);
  EXPECT_THAT(core_.Last<CloseSession>(), SizeIs(1));
}

}  // namespace
}  // namespace upipe::coordinator
