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
  // A job of four ranks that may be restarted; with a path it checkpoints.
  v1::JobSpec Durable(const std::string& path = "") {
    v1::JobSpec spec = SpecOf(4);
    spec.mutable_restarts()->set_infrastructure(100);
    spec.mutable_restarts()->set_application(3);
    spec.mutable_restarts()->set_no_progress(3);
    spec.mutable_train()->set_steps(10);
    if (!path.empty()) {
      spec.mutable_checkpoint()->set_path(path);
      spec.mutable_checkpoint()->set_keep(2);
    }
    return spec;
  }
  void SubmitSpec(const v1::JobSpec& spec, const std::string& id = "j") {
    core_.Do(SubmitReceived{next_call_++, id, absl::StrCat("request-", id), spec});
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
  // The same, of a job that may be restarted.
  void RunDurable(const std::string& path = "") {
    Workers();
    SubmitSpec(Durable(path));
    Plan(4);
    Meet();
  }
  // From STARTING to RUNNING.
  void Meet() {
    ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
    TellAll(v1::RANK_STATE_READY);
    TellAll(v1::RANK_STATE_RUNNING);
    ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  }
  // Rank 2 fails and the gang is proven gone.
  void FailOnce(int code = 3) {
    Tell(Exit(2, v1::RANK_STATE_EXITED, code));
    GangGone();
  }
  void GangGone() {
    for (int r = 0; r < 4; ++r) Tell(Killed(r, v1::RANK_STATE_GONE));
  }
  // The back-off passes and the job is placed again.
  void PlaceAgain() {
    core_.Advance(core_.job("j").retry_at - core_.now().boot);
    Heartbeats();
    core_.Do(Tick{});
  }
  void Progress(int rank, int64_t step, double step_seconds = 0) {
    v1::Progress progress;
    *progress.mutable_ref() = ReportOf(rank, v1::RANK_STATE_RUNNING).ref();
    progress.mutable_report()->set_step(step);
    progress.mutable_report()->set_step_seconds(step_seconds);
    core_.Do(ProgressReceived{SessionOf(rank), progress});
  }
  // Of this generation, as rank 0's worker tells it.
  v1::CheckpointRef CheckpointOf(int64_t step, const std::string& id = "j") {
    v1::CheckpointRef ref;
    ref.set_generation(core_.job(id).record.generation());
    ref.set_step(step);
    ref.set_manifest_sha256(absl::StrCat("sum ", step));
    return ref;
  }
  void Commit(int64_t step) {
    v1::RankReport report = ReportOf(0, v1::RANK_STATE_RUNNING);
    *report.mutable_last_commit() = CheckpointOf(step);
    Tell(report);
  }
  v1::WhyResponse WhyOf(const std::string& id = "j") {
    return *Why(core_.state(), id, core_.now());
  }
  std::string LastEvent(const std::string& id = "j") {
    return core_.job(id).record.events().rbegin()->message();
  }
  bool HasEvent(const std::string& kind, const std::string& id = "j") {
    for (const v1::JobEvent& event : core_.job(id).record.events()) {
      if (event.kind() == kind) return true;
    }
    return false;
  }
  void Heartbeats() {
    for (const auto& [worker, node] : core_.state().nodes) {
      if (node.session != 0) core_.Do(HeartbeatReceived{node.session, 1});
    }
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
