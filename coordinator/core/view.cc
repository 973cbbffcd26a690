#include "coordinator/core/view.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "coordinator/core/page_token.h"
#include "coordinator/core/waiting.h"

namespace upipe::coordinator {
namespace {

constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
constexpr size_t kMaxPageBytes = 2 << 20;  // half of what a gRPC client takes by default
constexpr size_t kMaxIdBytes = 70;         // a name of 63, '-', 6 random characters

std::string ShownState(const v1::JobRecord& record) {
  if (record.state() == v1::JOB_STATE_STOPPING && record.intent() == v1::STOP_INTENT_CANCEL) {
    return "CANCELLING";
  }
  if (record.state() == v1::JOB_STATE_STOPPING && record.intent() <= v1::STOP_INTENT_REQUEUE) {
    return "RESTARTING";
  }
  if (record.state() == v1::JOB_STATE_QUEUED && record.held()) return "HELD";
  const std::string& name = v1::JobState_Name(record.state());
  return name.substr(std::string("JOB_STATE_").size());
}

void AddRanks(const Attempt& attempt, JobDetail detail, v1::Job* view) {
  for (int r = 0; r < attempt.record.ranks_size(); ++r) {
    const v1::RankRecord& rank = attempt.record.ranks(r);
    v1::RankStatus& status = *view->add_ranks();
    status.set_rank(r);
    status.set_node(rank.worker());
    status.set_slot(rank.slot());
    status.set_state(rank.state());
    if (rank.has_exit_code()) status.set_exit_code(rank.exit_code());
    if (rank.has_signal()) status.set_signal(rank.signal());
    if (detail == JobDetail::kSummary) continue;
    if (rank.has_last_report()) *status.mutable_last_report() = rank.last_report();
    // Only of ranks that run: a position of one that has ended would tell where it died for ever.
    if (rank.state() == v1::RANK_STATE_RUNNING && r < static_cast<int>(attempt.soft.size()) &&
        attempt.soft[r].position) {
      *status.mutable_position() = *attempt.soft[r].position;
    }
  }
  if (attempt.record.ranks_size() > 0 && attempt.record.ranks(0).has_last_report()) {
    *view->mutable_last_report() = attempt.record.ranks(0).last_report();
  }
}

// Everything wrong with a ListJobsRequest.
std::vector<FieldViolation> ListViolations(const v1::ListJobsRequest& request) {
  std::vector<FieldViolation> violations;
  if (request.page_size() < 0 || request.page_size() > kMaxPageSize) {
    violations.push_back(
        {"page_size", absl::StrCat("is ", request.page_size(), ", must be 0 to ", kMaxPageSize)});
  }
  if (!request.page_token().empty() && !ReadPageToken(request, request.page_token())) {
    violations.push_back({"page_token",
                          "is not one this service gave for these filters; start from the first "
                          "page, without a token"});
  }
  for (int i = 0; i < request.states_size(); ++i) {
    if (v1::JobState_IsValid(request.states(i)) && request.states(i) != v1::JOB_STATE_UNSPECIFIED)
      continue;
    violations.push_back({absl::StrCat("states[", i, "]"),
                          absl::StrCat(static_cast<int>(request.states(i)), " is no job state")});
  }
  if (request.id_prefix().size() > kMaxIdBytes) {
    violations.push_back(
        {"id_prefix", absl::StrCat("has ", request.id_prefix().size(),
                                   " characters; an id has at most ", kMaxIdBytes)});
  }
  if (request.has_submitted_from_unix_millis() && request.has_submitted_until_unix_millis() &&
      request.submitted_until_unix_millis() <= request.submitted_from_unix_millis()) {
    violations.push_back(
        {"submitted_until_unix_millis", absl::StrCat("is ", request.submitted_until_unix_millis(),
                                                     ", must be after submitted_from_unix_millis, ",
                                                     request.submitted_from_unix_millis())});
  }
  return violations;
}

// Whether a job passes the request's filters.
bool IsListed(const v1::JobRecord& job, const v1::ListJobsRequest& request) {
  const auto& states = request.states();
  if (!states.empty() && std::find(states.begin(), states.end(), job.state()) == states.end())
    return false;
  if (!absl::StartsWith(job.id(), request.id_prefix())) return false;
  const int64_t submitted = job.submitted_unix_millis();
  if (request.has_submitted_from_unix_millis() && submitted < request.submitted_from_unix_millis())
    return false;
  return !request.has_submitted_until_unix_millis() ||
         submitted < request.submitted_until_unix_millis();
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
  view.set_held(record.held());
  *view.mutable_restarts() = record.restarts();
  if (record.has_last_commit()) *view.mutable_last_commit() = record.last_commit();
  if (job.attempt && job.attempt->record.has_resume()) {
    *view.mutable_resume() = job.attempt->record.resume();
  }
  view.set_retry_at_unix_millis(record.retry_at_unix_millis());
  if (job.attempt) AddRanks(*job.attempt, detail, &view);
  if (detail == JobDetail::kSummary) {
    view.mutable_cause()->clear_log_tail();
    if (!record.has_cause()) view.clear_cause();
    return view;
  }
  if (job.plan) *view.mutable_plan() = *job.plan;
  *view.mutable_events() = record.events();
  *view.mutable_attempts() = record.attempts();
  return view;
}

namespace {

// With the reason of jobs behind the head, which no pass of the scheduler looks at.
v1::Job ViewIn(const State& state, const Job& job, JobDetail detail) {
  v1::Job view = ViewJob(job, detail);
  const auto head = state.jobs.find(state.head);
  if (job.record.state() == v1::JOB_STATE_QUEUED && head != state.jobs.end() &&
      KeyOf(head->second.record) < KeyOf(job.record) && !job.record.held()) {
    view.set_reason(absl::StrCat("behind ", state.head));
  }
  return view;
}

// 1 = next; a held job has none, and takes none from the others.
int32_t PositionOf(const State& state, const Job& job) {
  if (job.record.held()) return 0;
  int32_t position = 1;
  for (const auto& [key, id] : state.queue) {
    if (key >= KeyOf(job.record)) break;
    position += !state.jobs.at(id).record.held();
  }
  return position;
}

}  // namespace

absl::Status JobNotFound(const std::string& id) {
  return RpcError(Reason::kJobNotFound, absl::StrCat("no job ", id), {{"job", id}});
}

absl::StatusOr<v1::Job> GetJob(const State& state, const std::string& id) {
  const auto job = state.jobs.find(id);
  if (job == state.jobs.end()) return JobNotFound(id);
  return ViewIn(state, job->second, JobDetail::kFull);
}

absl::StatusOr<v1::ListJobsResponse> ListJobs(const State& state,
                                              const v1::ListJobsRequest& request) {
  const std::vector<FieldViolation> violations = ListViolations(request);
  if (!violations.empty()) return InvalidFields(Reason::kRequestInvalid, violations);
  const int64_t before = request.page_token().empty()
                             ? state.next_submit_number
                             : *ReadPageToken(request, request.page_token());
  std::vector<const Job*> jobs;
  for (const auto& [id, job] : state.jobs) {
    if (job.record.submit_number() < before && IsListed(job.record, request)) jobs.push_back(&job);
  }
  std::sort(jobs.begin(), jobs.end(), [](const Job* a, const Job* b) {
    return a->record.submit_number() > b->record.submit_number();
  });
  const size_t page_size = request.page_size() == 0 ? kDefaultPageSize : request.page_size();
  v1::ListJobsResponse response;
  size_t bytes = 0, listed = 0;
  for (; listed < std::min(page_size, jobs.size()); ++listed) {
    v1::Job view = ViewIn(state, *jobs[listed], JobDetail::kSummary);
    bytes += view.ByteSizeLong();
    if (listed > 0 && bytes > kMaxPageBytes) break;
    *response.add_jobs() = std::move(view);
  }
  if (listed < jobs.size()) {
    response.set_next_page_token(MakePageToken(request, jobs[listed - 1]->record.submit_number()));
  }
  return response;
}

absl::StatusOr<v1::WhyResponse> Why(const State& state, const std::string& id, Moment now) {
  const auto found = state.jobs.find(id);
  if (found == state.jobs.end()) return JobNotFound(id);
  const Job& job = found->second;
  v1::WhyResponse response;
  *response.mutable_job() = ViewIn(state, job, JobDetail::kSummary);
  const auto answer = [&](v1::WaitReason reason, std::string message) {
    response.set_reason(reason);
    response.set_message(std::move(message));
    return response;
  };
  switch (job.record.state()) {
    case v1::JOB_STATE_PLANNING:
      return answer(v1::WAIT_REASON_PLANNING,
                    job.reason.empty() ? "its plan is being made" : job.reason);
    case v1::JOB_STATE_QUEUED: {
      const Fit fit = FitOf(state, NeedOf(job), now.boot);
      Wait wait = WaitOf(state, job, fit, now.boot);
      response.set_position(PositionOf(state, job));
      if (wait.message.empty()) wait.message = "it is placed next";
      return answer(wait.reason, std::move(wait.message));
    }
    case v1::JOB_STATE_STARTING:
      return answer(v1::WAIT_REASON_STARTING,
                    absl::StrCat(job.attempt->peers_sent ? "its ranks meet and restore"
                                                         : "its ranks are being started",
                                 ", generation ", job.record.generation()));
    case v1::JOB_STATE_RUNNING:
      return answer(v1::WAIT_REASON_RUNNING,
                    absl::StrCat("it runs, generation ", job.record.generation()));
    case v1::JOB_STATE_STOPPING:
      return answer(v1::WAIT_REASON_STOPPING, job.reason.empty() ? "its ranks leave" : job.reason);
    default:
      return answer(v1::WAIT_REASON_ENDED,
                    absl::StrCat("it has ended: ", ShownState(job.record),
                                 job.record.cause().message().empty() ? "" : ", ",
                                 job.record.cause().message()));
  }
}

v1::Node ViewNode(const State& state, const Node& node, BootTime now) {
  v1::Node view;
  view.set_worker(node.record.worker());
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
  view.set_cordoned(node.record.cordoned());
  view.set_cordon_reason(node.record.cordon_reason());
  view.set_leaving(node.leaving);
  for (size_t s = 0; s < node.slots.size(); ++s) {
    v1::Slot& slot = *view.add_slots();
    slot.set_index(s);
    slot.set_state(StateOf(state, node, node.slots[s], now));
    if (node.slots[s].device.ByteSizeLong() > 0) *slot.mutable_device() = node.slots[s].device;
    if (!node.slots[s].holder) continue;
    slot.set_job_id(node.slots[s].holder->job_id);
    slot.set_generation(node.slots[s].holder->generation);
    slot.set_rank(node.slots[s].holder->rank);
  }
  return view;
}

v1::ListNodesResponse ListNodes(const State& state, BootTime now) {
  v1::ListNodesResponse response;
  response.set_coordinator_epoch(state.epoch);
  for (const auto& [worker, node] : state.nodes) {
    *response.add_nodes() = ViewNode(state, node, now);
  }
  return response;
}

}  // namespace upipe::coordinator
