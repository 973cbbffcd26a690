// A job on workers `a` (session 1) and `b` (session 2), two slots each, taken to the state a test
// starts from.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/coordinator/core_driver.h"

namespace upipe::coordinator {

class Scene : public ::testing::Test {
 protected:
  void Workers(int slots = 2) {
    core_.Do(HelloReceived{1, HelloOf("a", slots)});
    core_.Do(HelloReceived{2, HelloOf("b", slots)});
  }
  void Submit(int ranks, const std::string& id = "j") {
    core_.Do(SubmitReceived{next_call_++, id, absl::StrCat("request-", id), SpecOf(ranks)});
  }
  void Plan(int ranks, const std::string& id = "j", int64_t bytes = 100) {
    core_.Do(PlanFinished{id, PlanOf(ranks, bytes)});
  }
  // Of rank `rank` of job `id`, as its worker tells it.
  v1::RankReport ReportOf(int rank, v1::RankState state, const std::string& id = "j") {
    const v1::AttemptRecord& attempt = core_.job(id).attempt->record;
    v1::RankReport report;
    v1::Fence& fence = *report.mutable_ref()->mutable_fence();
    fence.set_job_id(id);
    fence.set_generation(attempt.generation());
    fence.set_nonce(attempt.nonce());
    report.mutable_ref()->set_rank(rank);
    report.set_slot(attempt.ranks(rank).slot());
    report.set_state(state);
    if (state >= v1::RANK_STATE_READY) {
      report.set_address(absl::StrCat("address ", rank));
      report.set_plan_hash(77);
    }
    return report;
  }
  SessionId SessionOf(int rank, const std::string& id = "j") {
    const std::string& worker = core_.job(id).attempt->record.ranks(rank).worker();
    return core_.state().nodes.at(worker).session;
  }
  void Tell(const v1::RankReport& report) {
    core_.Do(
        RankReported{SessionOf(report.ref().rank(), report.ref().fence().job_id()), 9, report});
  }
  void TellAll(v1::RankState state, int ranks = 4) {
    for (int r = 0; r < ranks; ++r) Tell(ReportOf(r, state));
  }
  v1::RankReport Exit(int rank, v1::RankState state, int code) {
    v1::RankReport report = ReportOf(rank, state);
    report.set_exit_code(code);
    return report;
  }
  v1::RankReport Killed(int rank, v1::RankState state) {
    v1::RankReport report = ReportOf(rank, state);
    report.set_signal(9);
    report.set_signal_sent_by_worker(true);
    return report;
  }
  void Starting() {
    Workers();
    Submit(4);
    Plan(4);
    ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
  }
  void Running() {
    Starting();
    TellAll(v1::RANK_STATE_READY);
    TellAll(v1::RANK_STATE_RUNNING);
    ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  }
  void Heartbeats() {
    core_.Do(HeartbeatReceived{1, 1});
    core_.Do(HeartbeatReceived{2, 1});
  }
  v1::JobState Cancel(const std::string& id = "j") {
    core_.Do(CancelReceived{next_call_++, id});
    const auto replies = core_.Last<ReplyJob>();
    EXPECT_EQ(replies.size(), 1u);
    return (*replies.at(0).job)->state();
  }
  const v1::Cause& cause() { return core_.job("j").record.cause(); }
  v1::SlotState SlotOf(const std::string& worker, int slot) {
    const Node& node = core_.state().nodes.at(worker);
    return StateOf(core_.state(), node, node.slots[slot], core_.now().boot);
  }

  MemoryStore store_;
  CoreDriver core_{store_};
  CallId next_call_ = 1;
};

}  // namespace upipe::coordinator
