// Submit, plan, cancel, stop and end: the rows of the job table that do not start from a rank's
// report.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"
#include "common/utf8.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxPlanBytes = 512 << 10;
constexpr int kMaxLogTailLines = 50;
constexpr size_t kMaxLogLineBytes = 1000;
constexpr int kPlannerCrashesToFail = 2;

v1::Cause MakeCause(v1::CauseKind kind, std::string message) {
  v1::Cause cause;
  cause.set_kind(kind);
  cause.set_message(std::move(message));
  return cause;
}

// A worker's words, cut to what a record may hold.
v1::Cause Bounded(v1::Cause cause) {
  auto& tail = *cause.mutable_log_tail();
  if (tail.size() > kMaxLogTailLines) tail.DeleteSubrange(0, tail.size() - kMaxLogTailLines);
  for (std::string& line : tail) line = ToUtf8(line, kMaxLogLineBytes);
  cause.set_message(ToUtf8(cause.message(), 4 * kMaxLogLineBytes));
  cause.set_evidence(ToUtf8(cause.evidence(), 4 * kMaxLogLineBytes));
  return cause;
}

const char* KindOf(v1::JobState state) {
  switch (state) {
    case v1::JOB_STATE_SUCCEEDED:
      return "SUCCEEDED";
    case v1::JOB_STATE_FAILED:
      return "FAILED";
    case v1::JOB_STATE_CANCELLED:
      return "CANCELLED";
    default:
      return "UNSPECIFIED";
  }
}

const char* NameOf(v1::StopIntent intent) {
  switch (intent) {
    case v1::STOP_INTENT_FAIL:
      return "fail";
    case v1::STOP_INTENT_CANCEL:
      return "cancel";
    case v1::STOP_INTENT_SUCCEED:
      return "succeed";
    default:
      return "unspecified";
  }
}

}  // namespace

int64_t PlannedBytesPerRank(const v1::RunPlan& plan) {
  int64_t bytes = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    bytes = std::max(bytes, rank.memory().arena_bytes() + rank.host_memory().arena_bytes());
  }
  return bytes;
}

Job* Turn::FindJob(const std::string& id) {
  const auto found = state_.jobs.find(id);
  return found == state_.jobs.end() ? nullptr : &found->second;
}

void Turn::Handle(const SubmitReceived& event) {
  const auto known = state_.job_of_request.find(event.request_id);
  if (known != state_.job_of_request.end()) return Reply(event.call, state_.jobs.at(known->second));
  const int64_t ranks = event.spec.parallel().ranks();
  const int64_t slots = NumKnownSlots(state_);
  if (!state_.nodes.empty() && slots < ranks) {
    return Reply(event.call,
                 RpcError(Reason::kSlotsTooFew,
                          absl::StrCat("the job needs ", ranks, " ranks, the ", state_.nodes.size(),
                                       " known workers have ", slots,
                                       " slots together; add workers or lower parallel.ranks"),
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
  job.request_unsaved = true;
  job.known_since = now_.boot;
  state_.job_of_request[event.request_id] = event.job_id;
  state_.queue[job.record.submit_number()] = event.job_id;
  AddEvent(job, "PLANNING", absl::StrCat("submitted, ", ranks, " ranks"));
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
      return FailUnplaced(*job, v1::CAUSE_KIND_PLAN_REFUSED, event.result->refusal().message());
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
  const std::optional<int64_t> offered = OfferedBytesPerRank(state_, ranks);
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
  job.plan = std::make_shared<const v1::RunPlan>(plan);
  job.plan_unsaved = true;
  job.record.set_state(v1::JOB_STATE_QUEUED);
  AddEvent(job, "QUEUED", absl::StrCat("planned: ", FormatBytes(needed), " per rank"));
}

void Turn::EndUnplaced(Job& job, v1::JobState end, v1::Cause cause) {
  if (job.planner_running) {
    out_.actions.push_back(KillPlanner{job.record.id()});
    job.planner_running = false;
  }
  state_.queue.erase(job.record.submit_number());
  job.record.set_state(end);
  job.record.set_ended_unix_millis(now_.unix_millis);
  job.reason.clear();
  AddEvent(job, KindOf(end), cause.message());
  *job.record.mutable_cause() = std::move(cause);
}

void Turn::FailUnplaced(Job& job, v1::CauseKind kind, std::string message) {
  EndUnplaced(job, v1::JOB_STATE_FAILED, MakeCause(kind, std::move(message)));
}

void Turn::Handle(const CancelReceived& event) {
  Job* job = FindJob(event.job_id);
  if (job == nullptr) {
    return Reply(event.call, JobNotFound(event.job_id));
  }
  const v1::Cause cause = MakeCause(v1::CAUSE_KIND_USER, "cancelled by the user");
  const v1::JobState state = job->record.state();
  if (state == v1::JOB_STATE_PLANNING || state == v1::JOB_STATE_QUEUED) {
    EndUnplaced(*job, v1::JOB_STATE_CANCELLED, cause);
  } else if (!IsTerminal(state)) {
    Stop(*job, v1::STOP_INTENT_CANCEL, cause);
  }
  Reply(event.call, *job);
}

void Turn::Stop(Job& job, v1::StopIntent intent, v1::Cause cause) {
  UPIPE_CHECK(job.attempt.has_value() && !IsTerminal(job.record.state()));
  const bool stopping = job.record.state() == v1::JOB_STATE_STOPPING;
  if (stopping && intent <= job.record.intent()) return;
  job.record.set_intent(intent);
  if (intent != v1::STOP_INTENT_SUCCEED && !job.record.has_cause()) {
    *job.record.mutable_cause() = Bounded(cause);
  }
  AddEvent(job, "STOPPING",
           absl::StrCat(NameOf(intent), cause.message().empty() ? "" : ": ", cause.message()));
  if (!stopping) {
    job.record.set_state(v1::JOB_STATE_STOPPING);
    const absl::Duration grace =
        intent == v1::STOP_INTENT_CANCEL ? state_.timing.kill_bound / 2 : absl::ZeroDuration();
    job.attempt->kill_at = now_.boot + grace;
    for (v1::RankRecord& rank : *job.attempt->record.mutable_ranks()) {
      const Node* node = FindNode(rank.worker());
      if (node != nullptr && node->lost && rank.state() != v1::RANK_STATE_GONE) {
        rank.set_state(v1::RANK_STATE_PRESUMED_GONE);
      }
    }
  }
  SendStops(job);
  EndIfGone(job);
}

void Turn::Fail(Job& job, v1::CauseKind kind, std::string message, int rank) {
  v1::Cause cause = MakeCause(kind, std::move(message));
  if (rank >= 0) {
    cause.set_rank(rank);
    cause.set_node(job.attempt->record.ranks(rank).worker());
  }
  Stop(job, v1::STOP_INTENT_FAIL, std::move(cause));
}

void Turn::SendStops(const Job& job) {
  // Ranks of a finished job end by themselves; their workers prove it unasked.
  if (job.record.intent() == v1::STOP_INTENT_SUCCEED) return;
  std::set<std::string> workers;
  for (const v1::RankRecord& rank : job.attempt->record.ranks()) {
    if (rank.state() != v1::RANK_STATE_GONE) workers.insert(rank.worker());
  }
  const absl::Duration grace = std::max(absl::ZeroDuration(), job.attempt->kill_at - now_.boot);
  for (const std::string& worker : workers) {
    const Node* node = FindNode(worker);
    if (node != nullptr) SendStop(*node, FenceOf(job), grace, job.record.cause().message());
  }
}

void Turn::EndIfGone(Job& job) {
  if (job.record.state() != v1::JOB_STATE_STOPPING) return;
  bool all_over = true;        // proven or presumed, every one
  bool reachable_gone = true;  // proven, every one that can be asked
  bool dead = false;           // an unfinished rank is proven gone: the generation cannot go on
  std::set<std::string> awaited;
  for (const v1::RankRecord& rank : job.attempt->record.ranks()) {
    if (rank.state() == v1::RANK_STATE_GONE) {
      dead = dead || !IsFinished(rank);
      continue;
    }
    if (rank.state() != v1::RANK_STATE_PRESUMED_GONE) {
      all_over = false;
      awaited.insert(rank.worker());
    }
    if (IsReachable(rank.worker())) reachable_gone = false;
  }
  const v1::StopIntent intent = job.record.intent();
  const bool early = intent == v1::STOP_INTENT_FAIL && dead;
  if (!reachable_gone || !(all_over || early)) {
    return SetReason(job, awaited.empty()
                              ? ""
                              : absl::StrCat("waits for proof that its ranks are gone on ",
                                             absl::StrJoin(awaited, ", ")));
  }
  const v1::JobState end = intent == v1::STOP_INTENT_SUCCEED  ? v1::JOB_STATE_SUCCEEDED
                           : intent == v1::STOP_INTENT_CANCEL ? v1::JOB_STATE_CANCELLED
                                                              : v1::JOB_STATE_FAILED;
  job.record.set_state(end);
  job.record.set_ended_unix_millis(now_.unix_millis);
  job.reason.clear();
  state_.active.erase(job.record.id());
  AddEvent(job, KindOf(end), job.record.cause().message());
}

}  // namespace upipe::coordinator
