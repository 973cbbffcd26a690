#include "coordinator/core/view.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace upipe::coordinator {
namespace {

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;

std::string ShownState(const v1::JobRecord& record) {
  if (record.state() == v1::JOB_STATE_STOPPING && record.intent() == v1::STOP_INTENT_CANCEL) {
    return "CANCELLING";
  }
  const std::string& name = v1::JobState_Name(record.state());
  return name.substr(std::string("JOB_STATE_").size());
}

void AddRanks(const Attempt& attempt, v1::Job* view) {
  for (int r = 0; r < attempt.record.ranks_size(); ++r) {
    const v1::RankRecord& rank = attempt.record.ranks(r);
    v1::RankStatus& status = *view->add_ranks();
    status.set_rank(r);
    status.set_node(rank.worker());
    status.set_slot(rank.slot());
    status.set_state(rank.state());
    if (rank.has_exit_code()) status.set_exit_code(rank.exit_code());
    if (rank.has_signal()) status.set_signal(rank.signal());
    if (rank.has_last_report()) *status.mutable_last_report() = rank.last_report();
  }
  if (attempt.record.ranks_size() > 0 && attempt.record.ranks(0).has_last_report()) {
    *view->mutable_last_report() = attempt.record.ranks(0).last_report();
  }
}

}  // namespace

v1::Job ViewJob(const Job& job, JobDetail detail) {
  const v1::JobRecord& record = job.record;
  v1::Job view;
  view.set_id(record.id());
  *view.mutable_spec() = record.spec();
  view.set_state(record.state());
  view.set_intent(record.intent());
  view.set_shown_state(ShownState(record));
  view.set_generation(record.generation());
  if (record.has_cause()) *view.mutable_cause() = record.cause();
  view.set_reason(job.reason);
  view.set_submitted_unix_millis(record.submitted_unix_millis());
  view.set_started_unix_millis(record.started_unix_millis());
  view.set_ended_unix_millis(record.ended_unix_millis());
  view.set_revision(job.revision);
  if (job.attempt) AddRanks(*job.attempt, &view);
  if (detail == JobDetail::kSummary) {
    view.mutable_cause()->clear_log_tail();
    if (!record.has_cause()) view.clear_cause();
    return view;
  }
  if (job.plan) *view.mutable_plan() = *job.plan;
  *view.mutable_events() = record.events();
  return view;
}

absl::StatusOr<v1::Job> GetJob(const State& state, const std::string& id) {
  const auto job = state.jobs.find(id);
  if (job == state.jobs.end()) return absl::NotFoundError(absl::StrCat("no job ", id));
  return ViewJob(job->second, JobDetail::kFull);
}

absl::StatusOr<v1::ListJobsResponse> ListJobs(const State& state,
                                              const v1::ListJobsRequest& request) {
  if (request.page_size() < 0 || request.page_size() > kMaxPageSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size is ", request.page_size(), ", must be 0 to ", kMaxPageSize));
  }
  int64_t before = state.next_submit_number;  // the token: the last submit number already listed
  if (!request.page_token().empty() &&
      (!absl::SimpleAtoi(request.page_token(), &before) || before < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_token '", request.page_token(), "' is not one of this service"));
  }
  const size_t page_size = request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  const auto& states = request.states();
  std::vector<const Job*> jobs;
  for (const auto& [id, job] : state.jobs) {
    if (job.record.submit_number() >= before) continue;
    if (!states.empty() &&
        std::find(states.begin(), states.end(), job.record.state()) == states.end()) {
      continue;
    }
    jobs.push_back(&job);
  }
  std::sort(jobs.begin(), jobs.end(), [](const Job* a, const Job* b) {
    return a->record.submit_number() > b->record.submit_number();
  });
  v1::ListJobsResponse response;
  for (size_t i = 0; i < std::min(page_size, jobs.size()); ++i) {
    *response.add_jobs() = ViewJob(*jobs[i], JobDetail::kSummary);
  }
  if (jobs.size() > page_size) {
    response.set_next_page_token(absl::StrCat(jobs[page_size - 1]->record.submit_number()));
  }
  return response;
}

v1::ListNodesResponse ListNodes(const State& state, BootTime now) {
  v1::ListNodesResponse response;
  response.set_coordinator_epoch(state.epoch);
  for (const auto& [worker, node] : state.nodes) {
    v1::Node& view = *response.add_nodes();
    view.set_worker(worker);
    view.set_node_id(node.record.node_id());
    view.set_state(StateOf(state, node, now));
    view.set_memory_per_rank_bytes(node.record.memory_per_rank_bytes());
    view.set_metrics_address(node.record.metrics_address());
    view.set_containment(node.record.containment());
    view.set_isa(node.record.isa());
    view.set_version(node.record.version());
    view.set_backend(node.record.backend());
    view.set_insecure_listen(node.record.insecure_listen());
    view.set_silent_seconds(absl::ToDoubleSeconds(now - node.last_heard));
    for (size_t s = 0; s < node.slots.size(); ++s) {
      v1::Slot& slot = *view.add_slots();
      slot.set_index(s);
      slot.set_state(StateOf(state, node, node.slots[s], now));
      if (!node.slots[s].holder) continue;
      slot.set_job_id(node.slots[s].holder->job_id);
      slot.set_generation(node.slots[s].holder->generation);
      slot.set_rank(node.slots[s].holder->rank);
    }
  }
  return response;
}

}  // namespace upipe::coordinator
