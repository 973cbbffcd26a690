// What may not take for ever: a start, a stage, a job with a time limit.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/units.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxPositionsTold = 16;

// A start and a checkpoint move bytes of the whole model: they get the time for that on top.
bool IsLong(const v1::RankPosition& position) {
  return position.pass() == "starting" || position.pass() == "restoring" ||
         position.pass() == "checkpoint";
}

std::string Told(const v1::RankPosition& position) {
  return absl::StrCat("rank ", position.rank(), ": step ", position.step(), " ", position.pass(),
                      position.layer() < 0 ? "" : absl::StrCat(" layer ", position.layer()),
                      position.stage() < 0 ? "" : absl::StrCat(" stage ", position.stage()),
                      position.in_collective() ? " in" : " after", " collective ",
                      position.collective());
}

}  // namespace

void Turn::NotePositions(const Node& node, const v1::Heartbeat& heartbeat) {
  for (const v1::AttemptPositions& attempt : heartbeat.attempts()) {
    Job* job = FindJob(attempt.fence().job_id());
    if (job == nullptr || !state_.active.contains(job->record.id())) continue;
    for (const v1::RankPosition& position : attempt.ranks()) {
      const v1::RankRecord* rank = MatchingRank(*job, attempt.fence(), position.rank());
      if (rank == nullptr || rank->worker() != node.record.worker()) continue;
      RankSoftState& soft = job->attempt->soft[position.rank()];
      soft.position = position;
      soft.position_at = now_.boot;
    }
  }
}

void Turn::CheckStartDeadline(Job& job) {
  if (job.record.state() != v1::JOB_STATE_STARTING) return;
  const absl::Duration allowed = state_.timing.start_deadline + CheckpointAllowance(*job.plan);
  if (now_.boot - job.attempt->last_launch < allowed) return;
  std::vector<std::string> late;
  int first = -1;
  const v1::RankState due = job.attempt->peers_sent ? v1::RANK_STATE_RUNNING : v1::RANK_STATE_READY;
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    const v1::RankRecord& rank = job.attempt->record.ranks(r);
    if (rank.state() >= due) continue;
    if (first < 0) first = r;
    late.push_back(absl::StrCat("rank ", r, " on ", rank.worker()));
  }
  Fired(Row::kStartFailed);
  Restart(job, v1::CAUSE_KIND_LAUNCH,
          absl::StrCat("not ", job.attempt->peers_sent ? "past the first barrier" : "ready",
                       " within ", FormatTimeSpan(allowed), ": ", absl::StrJoin(late, ", ")),
          first);
}

// Silence of a worker is no stall: the verdict needs a fresh position of every rank that runs.
void Turn::CheckStall(Job& job) {
  if (job.record.state() != v1::JOB_STATE_RUNNING) return;
  absl::Duration deadline = StageDeadline(*job.plan, state_.timing);
  absl::Duration shortest = absl::InfiniteDuration();
  bool longer = false;
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    if (job.attempt->record.ranks(r).state() >= v1::RANK_STATE_EXITED) continue;
    const RankSoftState& soft = job.attempt->soft[r];
    if (!soft.position || now_.boot - soft.position_at >= state_.timing.SuspectAfter()) return;
    shortest = std::min(shortest, absl::Seconds(soft.position->seconds_in_place()));
    longer |= IsLong(*soft.position);
  }
  if (longer) deadline += CheckpointAllowance(*job.plan);
  if (shortest < deadline || shortest == absl::InfiniteDuration()) return;
  ++state_.tally.stalls;
  Fired(Row::kStalled);
  Stop(job, v1::STOP_INTENT_RESTART, StallCause(job, deadline), absl::ZeroDuration());
}

// The rank that all others wait for has entered the fewest collectives. When none is behind, no
// rank but what is between them is at fault.
v1::Cause Turn::StallCause(const Job& job, absl::Duration deadline) {
  std::vector<const v1::RankPosition*> positions;
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    if (job.attempt->record.ranks(r).state() >= v1::RANK_STATE_EXITED) continue;
    positions.push_back(&*job.attempt->soft[r].position);
  }
  std::stable_sort(positions.begin(), positions.end(),
                   [](const auto* a, const auto* b) { return a->collective() < b->collective(); });
  const v1::RankPosition& first = *positions.front();
  const v1::RankPosition& last = *positions.back();
  v1::Cause cause = MakeCause(v1::CAUSE_KIND_STALL,
                              absl::StrCat("no rank moved for ", FormatTimeSpan(deadline), ", "));
  if (first.collective() == last.collective() && positions.size() > 1) {
    absl::StrAppend(cause.mutable_message(), "all at collective ", first.collective(),
                    ": the communicator between them stands still");
  } else {
    absl::StrAppend(cause.mutable_message(), "the others wait for ", Told(first));
    cause.set_rank(first.rank());
    cause.set_node(job.attempt->record.ranks(first.rank()).worker());
  }
  std::vector<std::string> told;
  for (const v1::RankPosition* position : positions) {
    if (told.size() == kMaxPositionsTold) break;
    told.push_back(Told(*position));
  }
  cause.set_evidence(absl::StrJoin(told, "; "));
  return cause;
}

void Turn::CheckTimeLimit(Job& job) {
  const v1::JobSpec& spec = job.record.spec();
  if (!spec.has_time_limit_seconds()) return;
  if (job.record.state() != v1::JOB_STATE_STARTING && job.record.state() != v1::JOB_STATE_RUNNING)
    return;
  const absl::Duration used =
      absl::Milliseconds(job.record.used_millis()) + (now_.boot - job.attempt->placed_at);
  if (used < absl::Seconds(spec.time_limit_seconds())) return;
  Fired(Row::kTimeLimit);
  Stop(job, v1::STOP_INTENT_FAIL,
       MakeCause(v1::CAUSE_KIND_TIME_LIMIT,
                 absl::StrCat("ran ", FormatTimeSpan(used), ", time_limit_seconds is ",
                              spec.time_limit_seconds())),
       state_.timing.drain_grace);
}

}  // namespace upipe::coordinator
