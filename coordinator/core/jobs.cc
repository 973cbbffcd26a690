// Submit, plan, cancel, hold, and the records of ended jobs: the rows of the job table before and
// after a job is placed.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxPlanBytes = 512 << 10;
constexpr int kPlannerCrashesToFail = 2;

constexpr char kWithMeasured[] = "planned once more with the scratch that a worker measured: ";

constexpr int kMaxDropsPerTick = 16;  // jobs

const char* KindOf(v1::JobState state) {
  return state == v1::JOB_STATE_CANCELLED ? "CANCELLED" : "FAILED";
}

}  // namespace

Job* Turn::FindJob(const std::string& id) {
  const auto found = state_.jobs.find(id);
  return found == state_.jobs.end() ? nullptr : &found->second;
}

void Turn::Handle(const SubmitReceived& event) {
  const auto known = state_.job_of_request.find(event.request_id);
  if (!Holds(Guard::kRequestIsNew, known == state_.job_of_request.end())) {
    Fired(Row::kSubmitRepeated);
    return Reply(event.call, state_.jobs.at(known->second));
  }
  const int64_t ranks = event.spec.parallel().ranks();
  const int64_t slots = NumKnownSlots(state_, event.spec);
  if (!state_.nodes.empty() && slots < ranks) {
    return Reply(
        event.call,
        RpcError(Reason::kSlotsTooFew,
                 absl::StrCat("the job needs ", ranks, " ranks, the ", state_.nodes.size(),
                              " known workers have ", slots, " slots together",
                              OfBackend(event.spec), "; add workers or lower parallel.ranks"),
                 {{"ranks", ranks}, {"slots", slots}, {"workers", state_.nodes.size()}}));
  }
  if (state_.jobs.contains(event.job_id)) {
    return Reply(event.call,
                 RpcError(Reason::kJobIdTaken,
                          absl::StrCat("job id ", event.job_id, " is taken; submit again"),
                          {{"job", event.job_id}}));
  }
  Job& job = state_.jobs[event.job_id];
  job.record.set_id(event.job_id);
  job.record.set_request_id(event.request_id);
  *job.record.mutable_spec() = event.spec;
  job.record.set_state(v1::JOB_STATE_PLANNING);
  job.record.set_submitted_unix_millis(now_.unix_millis);
  job.record.set_submit_number(state_.next_submit_number++);
  job.record.set_held(event.hold);
  job.request_unsaved = true;
  job.known_since = now_.boot;
  state_.job_of_request[event.request_id] = event.job_id;
  state_.unplanned[KeyOf(job.record)] = event.job_id;
  Fired(Row::kSubmitted);
  AddEvent(job, "PLANNING",
           absl::StrCat("submitted, ", ranks, " ranks", event.hold ? ", held" : ""));
  Reply(event.call, job);
}

void Turn::Handle(const PlanFinished& event) {
  Job* job = FindJob(event.job_id);
  if (job == nullptr) return;
  job->planner_running = false;
  if (job->record.state() != v1::JOB_STATE_PLANNING) return;
  if (!event.result.ok()) {
    const int crashes = job->record.planner_crashes() + 1;
    job->record.set_planner_crashes(crashes);
    Fired(Row::kPlannerCrashed);
    AddEvent(*job, "PLANNER_CRASH", event.result.status().message());
    if (crashes < kPlannerCrashesToFail) return;
    return FailUnplaced(
        *job, v1::CAUSE_KIND_INTERNAL,
        absl::StrCat("planning this spec ended ", crashes,
                     " times without a result, last: ", event.result.status().message()));
  }
  switch (event.result->result_case()) {
    case v1::PlanResult::kPlan:
      return AcceptPlan(*job, event.result->plan());
    case v1::PlanResult::kRefusal:
      Fired(Row::kPlanRefused);
      return FailUnplaced(*job, v1::CAUSE_KIND_PLAN_REFUSED,
                          absl::StrCat(job->record.has_measured() ? kWithMeasured : "",
                                       event.result->refusal().message()));
    case v1::PlanResult::RESULT_NOT_SET:
      return FailUnplaced(*job, v1::CAUSE_KIND_INTERNAL, "the planner wrote an empty result");
  }
}

void Turn::AcceptPlan(Job& job, const v1::RunPlan& plan) {
  const int ranks = job.record.spec().parallel().ranks();
  if (plan.ranks_size() != ranks) {
    return FailUnplaced(
        job, v1::CAUSE_KIND_INTERNAL,
        absl::StrCat("the planner planned ", plan.ranks_size(), " ranks of ", ranks));
  }
  const size_t plan_bytes = plan.ByteSizeLong();
  if (plan_bytes > kMaxPlanBytes) {
    return FailUnplaced(job, v1::CAUSE_KIND_PLAN_REFUSED,
                        absl::StrCat("the plan is ", plan_bytes, " bytes, at most ", kMaxPlanBytes,
                                     " can be stored; lower parallel.ranks"));
  }
  const int64_t needed = PlannedBytesPerRank(plan);
  const std::optional<int64_t> offered = OfferedBytesPerRank(state_, job.record.spec());
  const v1::TrainSpec& train = job.record.spec().train();
  if (train.has_memory_per_rank() && needed > train.memory_per_rank()) {
    return FailUnplaced(job, v1::CAUSE_KIND_PLAN_REFUSED,
                        absl::StrCat("the plan takes ", FormatBytes(needed), " (", needed,
                                     " bytes) per rank, train.memory_per_rank is ",
                                     FormatBytes(train.memory_per_rank()), " (",
                                     train.memory_per_rank(), " bytes); raise it"));
  }
  if (offered && needed > *offered) {
    return FailUnplaced(
        job, v1::CAUSE_KIND_PLAN_REFUSED,
        absl::StrCat("the plan takes ", FormatBytes(needed), " (", needed,
                     " bytes) per rank, the workers offer ", FormatBytes(*offered), " (", *offered,
                     " bytes); lower train.context or parallel.heads_per_stage, or raise ranks"));
  }
  const std::string event =
      job.record.has_measured()
          ? absl::StrCat("planned once more: ", FormatBytes(needed), " per rank, ",
                         FormatBytes(PlannedBytesPerRank(*job.plan)), " before")
          : absl::StrCat("planned: ", FormatBytes(needed), " per rank");
  job.plan = std::make_shared<const v1::RunPlan>(plan);
  job.plan_unsaved = true;
  job.record.set_state(v1::JOB_STATE_QUEUED);
  state_.unplanned.erase(KeyOf(job.record));
  state_.queue[KeyOf(job.record)] = job.record.id();
  Fired(Row::kPlanned);
  AddEvent(job, "QUEUED", event);
}

void Turn::EndUnplaced(Job& job, v1::JobState end, v1::Cause cause) {
  if (job.planner_running) {
    out_.actions.push_back(KillPlanner{job.record.id()});
    job.planner_running = false;
  }
  state_.unplanned.erase(KeyOf(job.record));
  state_.queue.erase(KeyOf(job.record));
  job.record.set_state(end);
  job.record.set_ended_unix_millis(now_.unix_millis);
  job.record.clear_retry_at_unix_millis();
  ListEnded(state_, job.record);
  job.reason.clear();
  AddEvent(job, KindOf(end), cause.message());
  *job.record.mutable_cause() = std::move(cause);
}

void Turn::FailUnplaced(Job& job, v1::CauseKind kind, std::string message) {
  EndUnplaced(job, v1::JOB_STATE_FAILED, MakeCause(kind, std::move(message)));
}

void Turn::Handle(const CancelReceived& event) {
  Job* job = FindJob(event.job_id);
  if (job == nullptr) return Reply(event.call, JobNotFound(event.job_id));
  const v1::Cause cause = MakeCause(v1::CAUSE_KIND_USER, "cancelled by the user");
  switch (job->record.state()) {
    case v1::JOB_STATE_PLANNING:
    case v1::JOB_STATE_QUEUED:
      Fired(Row::kCancelledUnplaced);
      EndUnplaced(*job, v1::JOB_STATE_CANCELLED, cause);
      break;
    case v1::JOB_STATE_STARTING:
    case v1::JOB_STATE_RUNNING:
      Fired(Row::kCancelPlaced);
      Stop(*job, v1::STOP_INTENT_CANCEL, cause, event.grace.value_or(state_.timing.kill_bound / 2));
      break;
    case v1::JOB_STATE_STOPPING:
      if (job->record.intent() < v1::STOP_INTENT_CANCEL) Fired(Row::kCancelWhileStopping);
      if (job->record.intent() > v1::STOP_INTENT_CANCEL) Fired(Row::kCancelTooLate);
      Stop(*job, v1::STOP_INTENT_CANCEL, cause, event.grace.value_or(absl::ZeroDuration()));
      break;
    default:
      Fired(Row::kCancelTooLate);
  }
  Reply(event.call, *job);
}

void Turn::SetHeld(CallId call, const std::string& id, bool held) {
  Job* job = FindJob(id);
  if (job == nullptr) return Reply(call, JobNotFound(id));
  if (IsTerminal(job->record.state())) {
    return Reply(
        call, RpcError(Reason::kJobEnded, absl::StrCat("job ", id, " has ended; it is in no queue"),
                       {{"job", id}}));
  }
  if (job->record.held() != held) {
    job->record.set_held(held);
    Fired(held ? Row::kHeld : Row::kReleased);
    AddEvent(*job, held ? "HELD" : "RELEASED", "by the user");
  }
  Reply(call, *job);
}

void Turn::Handle(const HoldReceived& event) { SetHeld(event.call, event.job_id, true); }
void Turn::Handle(const ReleaseReceived& event) { SetHeld(event.call, event.job_id, false); }

void Turn::DropEnded() {
  const int64_t oldest = now_.unix_millis - absl::ToInt64Milliseconds(state_.retention.age);
  std::vector<std::string> dropped;
  const auto kept = static_cast<int64_t>(state_.ended.size());
  for (const auto& [ended, id] : state_.ended) {
    const auto number = static_cast<int64_t>(dropped.size());
    const bool over = kept - number > state_.retention.jobs || ended < oldest;
    if (!over || number == kMaxDropsPerTick) break;
    dropped.push_back(id);
  }
  for (const std::string& id : dropped) DropJob(id);
}

// Slots its ranks may still hold are held for a job nobody knows until their workers speak.
void Turn::DropJob(const std::string& id) {
  const Job& job = state_.jobs.at(id);
  Drop(absl::StrCat("job/", id), job.revision);
  Drop(absl::StrCat("request/", job.record.request_id()), std::nullopt);
  if (job.plan) Drop(absl::StrCat("plan/", id), std::nullopt);
  if (job.attempt) {
    Drop(AttemptKey(id, job.attempt->record.generation()), job.attempt->revision);
  }
  for (const auto& [generation, earlier] : job.earlier) {
    Drop(AttemptKey(id, generation), earlier.revision);
  }
  state_.job_of_request.erase(job.record.request_id());
  UnlistEnded(state_, job.record);
  state_.jobs.erase(id);
}

}  // namespace upipe::coordinator
