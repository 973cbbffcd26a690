// Stopping a placed job: intents and causes, proof, and what comes after a generation is closed:
// the queue again, or the end.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/units.h"
#include "common/utf8.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxLogTailLines = 50;
constexpr size_t kMaxLogLineBytes = 1000;
constexpr int kMaxSummaries = 16;
constexpr size_t kMaxSummaryBytes = 16 << 10;  // of one; with more ranks it names no workers

const char* NameOf(v1::StopIntent intent) {
  switch (intent) {
    case v1::STOP_INTENT_RESTART:
      return "restart";
    case v1::STOP_INTENT_REQUEUE:
      return "requeue";
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

// What a cause is charged to (CONTROL-PLANE; docs/adr/0014).
bool IsInfrastructure(v1::CauseKind kind) {
  return kind == v1::CAUSE_KIND_SIGNAL || kind == v1::CAUSE_KIND_NODE_LOST ||
         kind == v1::CAUSE_KIND_PEER_FAILURE || kind == v1::CAUSE_KIND_LAUNCH;
}

int64_t BestStepOf(const v1::AttemptRecord& attempt) {
  int64_t step = 0;
  for (const v1::RankRecord& rank : attempt.ranks()) {
    step = std::max(step, rank.last_report().step());
  }
  return step;
}

// A newer checkpoint than it went on from, or, without checkpoints, a step nobody took before.
bool MadeProgress(const v1::JobRecord& job, const v1::AttemptRecord& attempt) {
  if (!job.spec().checkpoint().path().empty()) {
    return attempt.last_commit().step() > attempt.resume().step();
  }
  return BestStepOf(attempt) > job.best_step();
}

v1::AttemptSummary SummaryOf(const v1::JobRecord& job, const v1::AttemptRecord& attempt,
                             int64_t unix_millis) {
  v1::AttemptSummary summary;
  summary.set_generation(attempt.generation());
  summary.set_placed_unix_millis(attempt.placed_unix_millis());
  summary.set_ended_unix_millis(unix_millis);
  summary.set_intent(job.intent());
  *summary.mutable_cause() = job.cause();
  v1::Cause& cause = *summary.mutable_cause();
  cause.clear_log_tail();
  cause.set_message(ToUtf8(cause.message(), kMaxLogLineBytes));
  cause.set_evidence(ToUtf8(cause.evidence(), kMaxLogLineBytes));
  summary.set_last_step(BestStepOf(attempt));
  int proven = 0;
  int presumed = 0;
  for (const v1::RankRecord& rank : attempt.ranks()) {
    proven += rank.state() == v1::RANK_STATE_GONE;
    presumed += rank.state() == v1::RANK_STATE_PRESUMED_GONE;
    summary.add_workers(rank.worker());
  }
  summary.set_ranks_proven_gone(proven);
  summary.set_ranks_presumed_gone(presumed);
  if (summary.ByteSizeLong() > kMaxSummaryBytes) summary.clear_workers();
  return summary;
}

}  // namespace

v1::Cause MakeCause(v1::CauseKind kind, std::string message) {
  v1::Cause cause;
  cause.set_kind(kind);
  cause.set_message(std::move(message));
  return cause;
}

v1::Cause Bounded(v1::Cause cause) {
  auto& tail = *cause.mutable_log_tail();
  if (tail.size() > kMaxLogTailLines) tail.DeleteSubrange(0, tail.size() - kMaxLogTailLines);
  for (std::string& line : tail) line = ToUtf8(line, kMaxLogLineBytes);
  cause.set_message(ToUtf8(cause.message(), 4 * kMaxLogLineBytes));
  cause.set_evidence(ToUtf8(cause.evidence(), 4 * kMaxLogLineBytes));
  return cause;
}

void Turn::Stop(Job& job, v1::StopIntent intent, v1::Cause cause, absl::Duration grace) {
  UPIPE_CHECK(job.attempt.has_value() && state_.active.contains(job.record.id()));
  const bool stopping = job.record.state() == v1::JOB_STATE_STOPPING;
  if (stopping && !Holds(Guard::kIntentRises, intent > job.record.intent())) return;
  job.record.set_intent(intent);
  if (intent == v1::STOP_INTENT_SUCCEED) {
    job.record.clear_cause();
  } else {
    *job.record.mutable_cause() = Bounded(std::move(cause));
  }
  const std::string& why = job.record.cause().message();
  AddEvent(job, "STOPPING", absl::StrCat(NameOf(intent), why.empty() ? "" : ": ", why));
  if (intent == v1::STOP_INTENT_SUCCEED) CountTime(job, state_.tally.kept_seconds, now_.boot);
  if (!stopping) {
    job.stopped_at = now_.boot;
    grace = UsefulGrace(job, grace);
    job.record.set_state(v1::JOB_STATE_STOPPING);
    job.record.set_used_millis(job.record.used_millis() +
                               absl::ToInt64Milliseconds(now_.boot - job.attempt->placed_at));
    for (v1::RankRecord& rank : *job.attempt->record.mutable_ranks()) {
      const Node* node = FindNode(rank.worker());
      if ((node == nullptr || node->lost) && rank.state() != v1::RANK_STATE_GONE) {
        rank.set_state(v1::RANK_STATE_PRESUMED_GONE);
      }
    }
  }
  if (!stopping || now_.boot + grace < job.attempt->kill_at) SetGrace(*job.attempt, grace);
  SendStops(job);
  EndIfGone(job);
}

void Turn::Restart(Job& job, v1::CauseKind kind, std::string message, int rank) {
  v1::Cause cause = MakeCause(kind, std::move(message));
  if (rank >= 0) {
    cause.set_rank(rank);
    cause.set_node(job.attempt->record.ranks(rank).worker());
  }
  Stop(job, v1::STOP_INTENT_RESTART, std::move(cause), absl::ZeroDuration());
}

// None when the next step boundary is further away than the grace.
absl::Duration Turn::UsefulGrace(const Job& job, absl::Duration grace) {
  if (job.record.state() != v1::JOB_STATE_RUNNING || grace <= absl::ZeroDuration()) return grace;
  const double step_seconds = job.attempt->record.ranks(0).last_report().step_seconds();
  if (!(step_seconds > 0)) return grace;  // nor when it is no number
  const BootTime boundary = job.attempt->soft[0].step_at + absl::Seconds(step_seconds);
  if (boundary <= now_.boot + grace) return grace;
  Note(absl::StrCat("job ", job.record.id(), " is stopped at once: its next step boundary is ",
                    FormatTimeSpan(boundary - now_.boot), " away, the grace is ",
                    FormatTimeSpan(grace)));
  return absl::ZeroDuration();
}

void Turn::SetGrace(Attempt& attempt, absl::Duration grace) {
  const int64_t millis = absl::ToInt64Milliseconds(std::max(absl::ZeroDuration(), grace));
  attempt.kill_at = now_.boot + absl::Milliseconds(millis);
  attempt.record.set_kill_at_unix_millis(now_.unix_millis + millis);
  attempt.record.set_grace_millis(millis);
}

// A generation that lost a rank reaches no boundary any more: what is left of its grace is over.
void Turn::KillNow(Job& job) {
  if (job.attempt->kill_at <= now_.boot) return;
  SetGrace(*job.attempt, absl::ZeroDuration());
  SendStops(job);
}

void Turn::SendStops(const Job& job) {
  // Ranks of a finished job end by themselves; their workers prove it unasked.
  if (job.record.intent() == v1::STOP_INTENT_SUCCEED) return;
  std::map<std::string, std::vector<v1::RankSlot>> placed;  // by worker
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    const v1::RankRecord& rank = job.attempt->record.ranks(r);
    if (rank.state() == v1::RANK_STATE_GONE) continue;
    placed[rank.worker()].push_back(RankSlotOf(r, rank.slot()));
  }
  const absl::Duration grace = std::max(absl::ZeroDuration(), job.attempt->kill_at - now_.boot);
  for (const auto& [worker, ranks] : placed) {
    const Node* node = FindNode(worker);
    if (node != nullptr) SendStop(*node, FenceOf(job), grace, job.record.cause().message(), ranks);
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
  const bool early = dead && intent <= v1::STOP_INTENT_FAIL;
  if (Holds(Guard::kReachableGone, reachable_gone) &&
      Holds(Guard::kGenerationDead, all_over || early)) {
    return CloseGeneration(job);
  }
  if (intent == v1::STOP_INTENT_CANCEL && reachable_gone && !all_over) {
    Fired(Row::kCancelWaitsForNode);
  }
  SetReason(job, awaited.empty() ? ""
                                 : absl::StrCat("waits for proof that its ranks are gone on ",
                                                absl::StrJoin(awaited, ", ")));
}

// Adds the attempt's time since it was last counted, for all its ranks.
void Turn::CountTime(Job& job, double& seconds, BootTime until) {
  Attempt& attempt = *job.attempt;
  if (until <= attempt.counted_until) return;
  seconds += attempt.record.ranks_size() * absl::ToDoubleSeconds(until - attempt.counted_until);
  attempt.counted_until = until;
}

// All ranks are at work: what was spent until now is nobody's gain.
void Turn::NoteRunning(Job& job) {
  CountTime(job, state_.tally.lost_seconds, now_.boot);
  if (job.record.started_unix_millis() == 0) {
    job.record.set_started_unix_millis(now_.unix_millis);
    state_.tally.queue_waits.Add(
        absl::Milliseconds(now_.unix_millis - job.record.submitted_unix_millis()));
  }
  if (job.stopped_at) state_.tally.restart_waits.Add(now_.boot - *job.stopped_at);
  job.stopped_at.reset();
}

// What no checkpoint holds of an attempt that did not succeed was done in vain.
void Turn::CountLosses(Job& job) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const int64_t begin = attempt.resume().step();
  const int64_t kept = std::max(begin, attempt.last_commit().step());
  state_.tally.lost_steps += std::max<int64_t>(0, BestStepOf(attempt) - kept);
}

// What the generation leaves behind is durable with what follows from it.
void Turn::CloseGeneration(Job& job) {
  v1::JobRecord& record = job.record;
  const v1::AttemptRecord& attempt = job.attempt->record;
  if (record.intent() != v1::STOP_INTENT_SUCCEED) CountLosses(job);
  CountTime(job, state_.tally.lost_seconds, now_.boot);
  state_.active.erase(record.id());
  job.reason.clear();
  const bool progress = MadeProgress(record, attempt);
  record.set_best_step(std::max(record.best_step(), BestStepOf(attempt)));
  if (record.intent() == v1::STOP_INTENT_RESTART && !MayRestart(job, progress)) {
    record.set_intent(v1::STOP_INTENT_FAIL);
  }
  if (record.attempts_size() >= kMaxSummaries) {
    record.mutable_attempts()->DeleteSubrange(0, record.attempts_size() - kMaxSummaries + 1);
  }
  *record.add_attempts() = SummaryOf(record, attempt, now_.unix_millis);
  switch (record.intent()) {
    case v1::STOP_INTENT_RESTART:
    case v1::STOP_INTENT_REQUEUE:
      return Requeue(job);
    case v1::STOP_INTENT_SUCCEED:
      return End(job, v1::JOB_STATE_SUCCEEDED);
    case v1::STOP_INTENT_CANCEL:
      return End(job, v1::JOB_STATE_CANCELLED);
    default:
      return End(job, v1::JOB_STATE_FAILED);
  }
}

// Charges the restart to its budgets, or says which of them is spent.
bool Turn::MayRestart(Job& job, bool progress) {
  v1::JobRecord& record = job.record;
  const v1::RestartSpec& budgets = record.spec().restarts();
  v1::RestartCounts counts = record.restarts();
  const bool infrastructure = IsInfrastructure(record.cause().kind());
  const int32_t fruitless = progress ? 0 : counts.no_progress() + 1;
  counts.set_no_progress(fruitless);
  if (infrastructure) {
    counts.set_infrastructure(counts.infrastructure() + 1);
  } else {
    counts.set_application(counts.application() + 1);
  }
  std::string spent;
  const auto check = [&](const char* name, int32_t count, int32_t budget, const char* what) {
    if (count <= budget || !spent.empty()) return;
    spent = absl::StrCat("not started again: restarts.", name, " allows ", budget, " ", what);
  };
  if (infrastructure) {
    check("infrastructure", counts.infrastructure(), budgets.infrastructure(), "for such causes");
  } else {
    check("application", counts.application(), budgets.application(), "for such causes");
  }
  check("no_progress", fruitless, budgets.no_progress(), "in a row without progress");
  if (!Holds(Guard::kBudgetLeft, spent.empty())) {
    Fired(Row::kBudgetSpent);
    record.mutable_cause()->set_message(absl::StrCat(record.cause().message(), "; ", spent));
    return false;
  }
  const v1::JobSpec& spec = record.spec();
  if (spec.has_time_limit_seconds() && record.used_millis() / 1000 >= spec.time_limit_seconds()) {
    record.mutable_cause()->set_message(absl::StrCat(record.cause().message(),
                                                     "; not started again: time_limit_seconds ",
                                                     spec.time_limit_seconds(), " is used up"));
    return false;
  }
  *record.mutable_restarts() = counts;
  ++state_.tally
        .restarts[{record.cause().kind(), infrastructure ? "infrastructure" : "application"}];
  return true;
}

void Turn::Requeue(Job& job) {
  v1::JobRecord& record = job.record;
  if (record.has_measured() && !job.plan->has_measured()) return PlanOnceMore(job);
  const bool restart = record.intent() == v1::STOP_INTENT_RESTART;
  // Progress starts the doubling anew: the first wait follows the first restart without.
  const int fruitless = restart ? std::max(0, record.restarts().no_progress() - 1) : 0;
  const absl::Duration wait = state_.timing.Backoff(fruitless);
  if (!restart) ++state_.tally.restarts[{record.cause().kind(), "none"}];
  job.retry_at = now_.boot + wait;
  record.set_retry_at_unix_millis(now_.unix_millis + absl::ToInt64Milliseconds(wait));
  Fired(restart ? Row::kRestarted : Row::kRequeued);
  AddEvent(job, "QUEUED",
           absl::StrCat("generation ", record.generation(), " is over: ", record.cause().message(),
                        "; tried again after ", FormatTimeSpan(wait)));
  record.set_state(v1::JOB_STATE_QUEUED);
  record.clear_intent();
  record.clear_cause();
  state_.queue[KeyOf(record)] = record.id();
}

// With what a worker measured; checkpoints of the generations so far stay what the job goes on
// from.
void Turn::PlanOnceMore(Job& job) {
  v1::JobRecord& record = job.record;
  ++state_.tally.restarts[{record.cause().kind(), "none"}];
  job.retry_at = now_.boot;
  AddEvent(job, "PLANNING",
           absl::StrCat("generation ", record.generation(), " is over: ", record.cause().message(),
                        "; planned once more with what was measured"));
  record.set_state(v1::JOB_STATE_PLANNING);
  record.set_planner_crashes(0);
  record.clear_intent();
  record.clear_cause();
  state_.unplanned[KeyOf(record)] = record.id();
}

void Turn::End(Job& job, v1::JobState end) {
  job.record.set_state(end);
  job.record.set_ended_unix_millis(now_.unix_millis);
  ListEnded(state_, job.record);
  const auto [row, kind] =
      end == v1::JOB_STATE_SUCCEEDED   ? std::pair(Row::kEndedSucceeded, "SUCCEEDED")
      : end == v1::JOB_STATE_CANCELLED ? std::pair(Row::kEndedCancelled, "CANCELLED")
                                       : std::pair(Row::kEndedFailed, "FAILED");
  Fired(row);
  AddEvent(job, kind, job.record.cause().message());
}

}  // namespace upipe::coordinator
