// What workers report about ranks: states, exits, steps, problems.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/utf8.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxProblemBytes = 900;  // below what an event is cut to
constexpr int kMaxProblems = 64;
constexpr size_t kMaxAddressBytes = 64 << 10;
constexpr size_t kMaxReferenceBytes = 1 << 10;  // of a checkpoint
constexpr size_t kMaxMeasuredBytes = 32 << 10;
constexpr size_t kMaxStepBytes = 64 << 10;  // of a step's report: counts for each peer

bool IsHolder(const SlotHolder& holder, const v1::RankRef& ref) {
  return holder.job_id == ref.fence().job_id() && holder.generation == ref.fence().generation() &&
         holder.nonce == ref.fence().nonce() && holder.rank == ref.rank();
}

// Why the rank of this report failed: the worker's own finding, or what follows from the exit
// itself.
v1::Cause CauseOf(const v1::RankReport& report, const v1::RankRecord& rank) {
  v1::Cause cause = report.cause();
  const int number = report.ref().rank();
  if (cause.kind() == v1::CAUSE_KIND_UNSPECIFIED) {
    if (report.signal_sent_by_worker()) {
      cause.set_kind(v1::CAUSE_KIND_PEER_FAILURE);
      cause.set_message(absl::StrCat("rank ", number, " was killed by its worker"));
    } else if (report.has_signal()) {
      cause.set_kind(v1::CAUSE_KIND_SIGNAL);
      cause.set_message(absl::StrCat("rank ", number, " died of signal ", report.signal()));
    } else if (report.has_exit_code()) {
      cause.set_kind(v1::CAUSE_KIND_EXIT_CODE);
      cause.set_message(absl::StrCat("rank ", number, " exited with code ", report.exit_code()));
    } else {
      cause.set_kind(v1::CAUSE_KIND_NODE_LOST);
      cause.set_message(absl::StrCat("rank ", number, " is gone, its worker does not know how"));
    }
  }
  cause.set_rank(number);
  cause.set_node(rank.worker());
  if (report.has_exit_code()) cause.set_exit_code(report.exit_code());
  if (report.has_signal()) cause.set_signal(report.signal());
  return cause;
}

// Whether a rank's own end explains more than the cause found so far (DESIGN section 7: the order
// of causes). A worker that ended its ranks of its own accord explains that their peers lost them.
bool Explains(const v1::RankReport& report, const v1::Cause& found, const v1::Cause& known) {
  if (known.kind() == v1::CAUSE_KIND_STALL) return false;  // what follows is its own doing
  if (report.cause().kind() == v1::CAUSE_KIND_NODE_LOST) {
    return known.kind() == v1::CAUSE_KIND_PEER_FAILURE;
  }
  return !report.signal_sent_by_worker() && found.kind() <= v1::CAUSE_KIND_EXIT_CODE &&
         found.kind() < known.kind();
}

bool IsListed(const std::vector<v1::CheckpointProblem>& known,
              const v1::CheckpointProblem& problem) {
  return std::any_of(known.begin(), known.end(), [&](const v1::CheckpointProblem& other) {
    return other.generation() == problem.generation() && other.step() == problem.step() &&
           other.message() == problem.message();
  });
}

std::string Path(absl::string_view field, absl::string_view name) {
  return absl::StrCat(field, ".", name);
}

void CheckSize(size_t bytes, size_t bytes_max, std::string field,
               std::vector<FieldViolation>& violations) {
  if (bytes <= bytes_max) return;
  violations.push_back(
      {std::move(field), absl::StrCat("has ", bytes, " bytes, at most ", bytes_max)});
}

}  // namespace

std::vector<FieldViolation> StepViolations(const v1::StepReport& report, absl::string_view field) {
  std::vector<FieldViolation> violations;
  CheckSize(report.ByteSizeLong(), kMaxStepBytes, std::string(field), violations);
  return violations;
}

std::vector<FieldViolation> ReportViolations(const v1::RankReport& report,
                                             absl::string_view field) {
  std::vector<FieldViolation> violations =
      StepViolations(report.last_step(), Path(field, "last_step"));
  if (report.state() < v1::RANK_STATE_PLACED || report.state() > v1::RANK_STATE_GONE) {
    violations.push_back(
        {Path(field, "state"), absl::StrCat("is ", static_cast<int>(report.state()), ", must be ",
                                            v1::RANK_STATE_PLACED, " to ", v1::RANK_STATE_GONE)});
  }
  CheckSize(report.address().size(), kMaxAddressBytes, Path(field, "address"), violations);
  CheckSize(report.resume().ByteSizeLong(), kMaxReferenceBytes, Path(field, "resume"), violations);
  CheckSize(report.last_commit().ByteSizeLong(), kMaxReferenceBytes, Path(field, "last_commit"),
            violations);
  CheckSize(report.measured().ByteSizeLong(), kMaxMeasuredBytes, Path(field, "measured"),
            violations);
  if (report.problems_size() > kMaxProblems) {
    violations.push_back(
        {Path(field, "problems"),
         absl::StrCat("has ", report.problems_size(), " entries, at most ", kMaxProblems)});
  }
  return violations;
}

v1::RankRecord* Turn::MatchingRank(Job& job, const v1::Fence& fence, int rank) {
  if (!job.attempt) return nullptr;
  v1::AttemptRecord& attempt = job.attempt->record;
  if (!Holds(Guard::kFenceMatches,
             attempt.generation() == fence.generation() && attempt.nonce() == fence.nonce())) {
    return nullptr;
  }
  if (rank < 0 || rank >= attempt.ranks_size()) return nullptr;
  return attempt.mutable_ranks(rank);
}

v1::RankSlot Turn::RankSlotOf(int rank, int slot) {
  v1::RankSlot placed;
  placed.set_rank(rank);
  placed.set_slot(slot);
  return placed;
}

void Turn::SendStop(const Node& node, const v1::Fence& fence, absl::Duration grace,
                    absl::string_view reason, const std::vector<v1::RankSlot>& placed) {
  v1::CoordinatorMessage message;
  v1::StopRanks& stop = *message.mutable_stop();
  *stop.mutable_fence() = fence;
  stop.mutable_fence()->set_epoch(state_.epoch);
  stop.set_grace_millis(absl::ToInt64Milliseconds(grace));
  stop.set_reason(std::string(reason));
  stop.mutable_ranks()->Assign(placed.begin(), placed.end());
  Send(node, std::move(message));
}

void Turn::Handle(const RankReported& event) {
  Node* node = NodeOf(event.session);
  if (node == nullptr) return Close(event.session, HelloMissing());
  const std::vector<FieldViolation> violations = ReportViolations(event.report, "rank");
  if (!violations.empty()) {
    node->session = 0;
    return Close(event.session, InvalidFields(Reason::kRequestInvalid, violations));
  }
  node->last_heard = now_.boot;
  ApplyReport(*node, event.report);
  v1::CoordinatorMessage ack;
  ack.mutable_rank_ack()->set_sequence(event.sequence);
  Send(*node, std::move(ack));
}

void Turn::Handle(const ProgressReceived& event) {
  Node* node = NodeOf(event.session);
  if (node == nullptr) return Close(event.session, HelloMissing());
  const std::vector<FieldViolation> violations =
      StepViolations(event.progress.report(), "progress.report");
  if (!violations.empty()) {
    node->session = 0;
    return Close(event.session, InvalidFields(Reason::kRequestInvalid, violations));
  }
  node->last_heard = now_.boot;
  const v1::RankRef& ref = event.progress.ref();
  Job* job = FindJob(ref.fence().job_id());
  if (job == nullptr || !state_.active.contains(job->record.id())) return;
  v1::RankRecord* rank = MatchingRank(*job, ref.fence(), ref.rank());
  if (rank == nullptr || rank->worker() != node->record.worker()) return;
  Fired(Row::kProgress);
  NoteStep(*job, ref.rank(), event.progress.report());
}

void Turn::NoteStep(Job& job, int rank, const v1::StepReport& report) {
  *job.attempt->record.mutable_ranks(rank)->mutable_last_report() = report;
  job.attempt->soft[rank].step_at = now_.boot;
  if (rank == 0) out_.actions.push_back(PublishReport{job.record.id(), report});
}

void Turn::ApplyReport(Node& node, const v1::RankReport& report) {
  const int index = report.slot();
  if (index < 0 || index >= static_cast<int>(node.slots.size())) {
    return Note(absl::StrCat("worker ", node.record.worker(), " reports slot ", index, " of ",
                             node.slots.size()));
  }
  Slot& slot = node.slots[index];
  const v1::Fence& fence = report.ref().fence();
  Job* job = FindJob(fence.job_id());
  v1::RankRecord* rank = job == nullptr ? nullptr : MatchingRank(*job, fence, report.ref().rank());
  if (rank != nullptr && (rank->worker() != node.record.worker() || rank->slot() != index)) {
    rank = nullptr;
  }
  if (rank != nullptr && rank->state() == v1::RANK_STATE_GONE) return;  // proof is final
  const bool freed =
      report.state() == v1::RANK_STATE_GONE ||
      (report.state() == v1::RANK_STATE_EXITED && Holds(Guard::kProofFreesSlot, false));
  if (freed) {
    if (slot.stray && IsHolder(*slot.stray, report.ref())) slot.stray.reset();
    if (slot.holder && IsHolder(*slot.holder, report.ref())) slot.Release();
  } else if (!slot.holder || !IsHolder(*slot.holder, report.ref())) {
    (slot.holder ? slot.stray : slot.holder) =
        SlotHolder{fence.job_id(), fence.generation(), fence.nonce(), report.ref().rank()};
  }
  if (slot.holder && IsHolder(*slot.holder, report.ref()) &&
      slot.holder->quarantined != report.quarantined()) {
    slot.holder->quarantined = report.quarantined();
    Note(absl::StrCat(
        "worker ", node.record.worker(), " slot ", index,
        report.quarantined() ? " is quarantined: rank " : " is out of quarantine: rank ",
        report.ref().rank(), " of job ", fence.job_id()));
  }
  if (rank != nullptr && state_.active.contains(job->record.id())) {
    return ApplyCurrent(*job, report);
  }
  if (report.state() != v1::RANK_STATE_GONE) return Disown(node, report, job);
  if (job != nullptr) NoteGone(*job, fence, report.ref().rank());
}

// A rank nobody wants: of no known job, of an older attempt, or of one that is closed.
void Turn::Disown(const Node& node, const v1::RankReport& report, const Job* job) {
  const std::string name =
      absl::StrCat("rank ", report.ref().rank(), " of job ", report.ref().fence().job_id(),
                   " generation ", report.ref().fence().generation());
  if (job == nullptr) {
    Note(absl::StrCat("ORPHAN: worker ", node.record.worker(), " slot ", report.slot(), " runs ",
                      name, ", which is in no record; killed"));
  }
  Fired(Row::kLateReport);
  SendStop(node, report.ref().fence(), absl::ZeroDuration(),
           job == nullptr ? "the coordinator knows no such job" : "superseded or ended");
}

// Proof of a rank whose generation is closed.
void Turn::NoteGone(Job& job, const v1::Fence& fence, int rank) {
  if (v1::RankRecord* current = MatchingRank(job, fence, rank)) {
    current->set_state(v1::RANK_STATE_GONE);
    Fired(Row::kRankGone);
    return Dirty(job);
  }
  const auto found = job.earlier.find(fence.generation());
  if (found == job.earlier.end()) return;
  const v1::AttemptRecord& attempt = found->second.record;
  if (attempt.nonce() != fence.nonce() || rank < 0 || rank >= attempt.ranks_size()) return;
  Fired(Row::kRankGone);
  found->second.record.mutable_ranks(rank)->set_state(v1::RANK_STATE_GONE);
  SaveEarlier(job, found->second);
}

// One rank less of an earlier attempt holds a slot; after the last its record goes. Written at
// once: a reload must find one record for each slot.
void Turn::SaveEarlier(Job& job, EarlierAttempt& earlier) {
  const v1::AttemptRecord& record = earlier.record;
  std::string key = AttemptKey(job.record.id(), record.generation());
  if (std::any_of(record.ranks().begin(), record.ranks().end(), HoldsSlot)) {
    const int64_t revision = ++state_.revision;
    out_.batches.push_back(
        Batch{{Write{std::move(key), record.SerializeAsString(), earlier.revision}}});
    earlier.revision = revision;
    return;
  }
  Drop(std::move(key), earlier.revision);
  job.earlier.erase(record.generation());
}

void Turn::ApplyCurrent(Job& job, const v1::RankReport& report) {
  const int number = report.ref().rank();
  v1::RankRecord& rank = *job.attempt->record.mutable_ranks(number);
  RankSoftState& soft = job.attempt->soft[number];
  if (!report.address().empty()) soft.address = report.address();
  if (report.plan_hash() != 0) soft.plan_hash = report.plan_hash();
  if (report.has_resume()) soft.proposal = report.resume();
  // The last steps before an end, when the session was closed to their Progress.
  if (report.last_step().step() > rank.last_report().step()) {
    NoteStep(job, number, report.last_step());
  }
  NoteProblems(job, report);
  if (number == 0 && report.has_last_commit()) NoteCommit(job, report.last_commit());
  const bool presumed = rank.state() == v1::RANK_STATE_PRESUMED_GONE;
  const bool later =
      presumed ? report.state() == v1::RANK_STATE_GONE : report.state() > rank.state();
  if (report.state() != rank.state() && Holds(Guard::kReportIsLater, later)) {
    if (rank.state() == v1::RANK_STATE_PLACED) job.attempt->last_launch = now_.boot;
    rank.set_state(report.state());
    if (report.state() == v1::RANK_STATE_GONE) Fired(Row::kRankGone);
    if (report.state() >= v1::RANK_STATE_EXITED) NoteExit(job, report);
  }
  Advance(job);
  EndIfGone(job);
}

void Turn::NoteProblems(Job& job, const v1::RankReport& report) {
  std::vector<v1::CheckpointProblem>& known = job.attempt->soft[report.ref().rank()].problems;
  for (const v1::CheckpointProblem& problem : report.problems()) {
    if (IsListed(known, problem)) continue;
    const std::string message =
        ToUtf8(absl::StrCat("rank ", report.ref().rank(), ", generation ", problem.generation(),
                            ", step ", problem.step(), ": ", problem.message()),
               kMaxProblemBytes);
    // A worker tells them again to a coordinator that has restarted.
    const auto& events = job.record.events();
    if (std::any_of(events.begin(), events.end(),
                    [&](const v1::JobEvent& event) { return event.message() == message; })) {
      continue;
    }
    ++state_.tally.checkpoint_problems;
    AddEvent(job, "CHECKPOINT_PROBLEM", message);
  }
  known.assign(report.problems().begin(), report.problems().end());
}

void Turn::NoteExit(Job& job, const v1::RankReport& report) {
  const int number = report.ref().rank();
  v1::RankRecord& rank = *job.attempt->record.mutable_ranks(number);
  const bool known = rank.has_exit_code() || rank.has_signal();
  if (report.has_exit_code()) rank.set_exit_code(report.exit_code());
  if (report.has_signal()) rank.set_signal(report.signal());
  Dirty(job);
  // GONE after EXITED is proof, not a second end.
  if (known && report.state() == v1::RANK_STATE_GONE) return;
  const bool explained = report.cause().kind() != v1::CAUSE_KIND_UNSPECIFIED;
  rank.set_left_early(report.has_exit_code() && report.exit_code() == 0 &&
                      (explained || !TookTheLastStep(job, number)));
  const bool failed = !report.stopped_on_notice() && (explained || !IsFinished(rank));
  if (job.record.state() == v1::JOB_STATE_STOPPING) {
    if (failed) NoteLateFailure(job, report);
    return;
  }
  if (report.stopped_on_notice()) {
    Fired(Row::kStoppedOnNotice);
    return Stop(job, v1::STOP_INTENT_REQUEUE,
                MakeCause(v1::CAUSE_KIND_USER, absl::StrCat("worker ", rank.worker(), " let rank ",
                                                            number, " leave at a step boundary")),
                state_.timing.drain_grace);
  }
  if (!failed) return;
  Fired(job.record.state() == v1::JOB_STATE_STARTING ? Row::kStartFailed : Row::kRunFailed);
  if (rank.left_early() && !explained) return ExitedEarly(job, number);
  v1::Cause cause = CauseOf(report, rank);
  const v1::StopIntent intent = IntentAfter(job, report, cause);
  Stop(job, intent, std::move(cause), absl::ZeroDuration());
}

// What follows from a rank's failure. A plan that fell short is nobody's failure the first time:
// another is made with what the worker measured.
v1::StopIntent Turn::IntentAfter(Job& job, const v1::RankReport& report, v1::Cause& cause) {
  // Another attempt would come to the same verdict.
  if (cause.kind() == v1::CAUSE_KIND_SELFCHECK) return v1::STOP_INTENT_FAIL;
  if (report.measured().ops().empty()) return v1::STOP_INTENT_RESTART;
  if (job.record.has_measured()) {
    absl::StrAppend(cause.mutable_message(),
                    "; it has been planned once more before: have workers of one kind, with the "
                    "same libraries");
    return v1::STOP_INTENT_FAIL;
  }
  Fired(Row::kPlanFellShort);
  *job.record.mutable_measured() = report.measured();
  return v1::STOP_INTENT_REQUEUE;
}

// A failure in a job that is stopping already: it may be the better explanation.
void Turn::NoteLateFailure(Job& job, const v1::RankReport& report) {
  KillNow(job);
  if (job.record.intent() != v1::STOP_INTENT_RESTART) return;
  v1::Cause cause = CauseOf(report, job.attempt->record.ranks(report.ref().rank()));
  const v1::StopIntent intent = IntentAfter(job, report, cause);
  if (intent != v1::STOP_INTENT_RESTART) return Stop(job, intent, cause, absl::ZeroDuration());
  if (!Explains(report, cause, job.record.cause())) return;
  *job.record.mutable_cause() = Bounded(cause);
  AddEvent(job, "CAUSE", cause.message());
}

bool Turn::TookTheLastStep(const Job& job, int rank) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const int64_t steps = job.record.spec().train().steps();
  // What a rank tells holds even where a restored store does not know that the ranks have met.
  const v1::RankRecord& record = attempt.ranks(rank);
  return (record.has_last_report() && record.last_report().step() >= steps) ||
         (attempt.resume_decided() && attempt.resume().step() >= steps);
}

// With code 0, which is fine only after the last step.
void Turn::ExitedEarly(Job& job, int rank) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const int64_t step = std::max(attempt.ranks(rank).last_report().step(), attempt.resume().step());
  Restart(job, v1::CAUSE_KIND_EXIT_CODE,
          attempt.resume_decided()
              ? absl::StrCat("rank ", rank, " exited with code 0 after step ", step, " of ",
                             job.record.spec().train().steps())
              : absl::StrCat("rank ", rank, " exited with code 0 before the ranks had met"),
          rank);
}

}  // namespace upipe::coordinator
