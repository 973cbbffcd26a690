// What workers report about ranks, and the rendezvous that follows from it.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

bool Holds(const SlotHolder& holder, const v1::RankRef& ref) {
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
  if (report.cause().kind() == v1::CAUSE_KIND_NODE_LOST) {
    return known.kind() == v1::CAUSE_KIND_PEER_FAILURE;
  }
  return !report.signal_sent_by_worker() && found.kind() <= v1::CAUSE_KIND_EXIT_CODE &&
         found.kind() < known.kind();
}

bool RendezvousComplete(const Attempt& attempt) {
  return std::all_of(attempt.soft.begin(), attempt.soft.end(),
                     [](const RankSoftState& soft) { return !soft.address.empty(); });
}

}  // namespace

v1::Fence Turn::FenceOf(const Job& job) const {
  v1::Fence fence;
  fence.set_job_id(job.record.id());
  fence.set_generation(job.attempt->record.generation());
  fence.set_nonce(job.attempt->record.nonce());
  fence.set_epoch(state_.epoch);
  return fence;
}

void Turn::SendStop(const Node& node, const v1::Fence& fence, absl::Duration grace,
                    absl::string_view reason) {
  v1::CoordinatorMessage message;
  v1::StopRanks& stop = *message.mutable_stop();
  *stop.mutable_fence() = fence;
  stop.mutable_fence()->set_epoch(state_.epoch);
  stop.set_grace_millis(absl::ToInt64Milliseconds(grace));
  stop.set_reason(std::string(reason));
  Send(node, std::move(message));
}

void Turn::SendStart(const Job& job, int rank) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const Node* node = FindNode(attempt.ranks(rank).worker());
  if (node == nullptr || node->session == 0) return;
  v1::CoordinatorMessage message;
  v1::StartRank& start = *message.mutable_start();
  *start.mutable_ref()->mutable_fence() = FenceOf(job);
  start.mutable_ref()->set_rank(rank);
  start.set_slot(attempt.ranks(rank).slot());
  *start.mutable_plan() = *job.plan;
  for (const v1::RankRecord& placed : attempt.ranks()) start.add_node_ids(placed.node_id());
  Send(*node, std::move(message));
}

void Turn::SendPeers(const Job& job, const Node& node) {
  v1::CoordinatorMessage message;
  v1::Peers& peers = *message.mutable_peers();
  *peers.mutable_fence() = FenceOf(job);
  for (const RankSoftState& soft : job.attempt->soft) peers.add_addresses(soft.address);
  Send(node, std::move(message));
}

void Turn::Handle(const RankReported& event) {
  Node* node = NodeOf(event.session);
  if (node == nullptr) return Close(event.session, HelloMissing());
  node->last_heard = now_.boot;
  ApplyReport(*node, event.report);
  v1::CoordinatorMessage ack;
  ack.mutable_rank_ack()->set_sequence(event.sequence);
  Send(*node, std::move(ack));
}

void Turn::Handle(const ProgressReceived& event) {
  Node* node = NodeOf(event.session);
  if (node == nullptr) return Close(event.session, HelloMissing());
  node->last_heard = now_.boot;
  const v1::RankRef& ref = event.progress.ref();
  Job* job = FindJob(ref.fence().job_id());
  if (job == nullptr || IsTerminal(job->record.state())) return;
  v1::RankRecord* rank = MatchingRank(*job, ref.fence(), ref.rank());
  if (rank == nullptr || rank->worker() != node->record.worker()) return;
  *rank->mutable_last_report() = event.progress.report();
  if (ref.rank() == 0) {
    out_.actions.push_back(PublishReport{job->record.id(), event.progress.report()});
  }
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
  if (report.state() == v1::RANK_STATE_GONE) {
    if (slot.holder && Holds(*slot.holder, report.ref())) slot.holder.reset();
  } else if (!slot.holder) {
    slot.holder =
        SlotHolder{fence.job_id(), fence.generation(), fence.nonce(), report.ref().rank()};
  }
  if (slot.holder && Holds(*slot.holder, report.ref()) &&
      slot.holder->quarantined != report.quarantined()) {
    slot.holder->quarantined = report.quarantined();
    Note(absl::StrCat(
        "worker ", node.record.worker(), " slot ", index,
        report.quarantined() ? " is quarantined: rank " : " is out of quarantine: rank ",
        report.ref().rank(), " of job ", fence.job_id()));
  }
  if (rank == nullptr) return Disown(node, report, job);
  if (!IsTerminal(job->record.state())) return ApplyCurrent(*job, report);
  if (report.state() != v1::RANK_STATE_GONE) return Disown(node, report, job);
  rank->set_state(v1::RANK_STATE_GONE);
  Dirty(*job);
}

// A rank nobody wants: of no known job, of an older attempt, or of a job that ended.
void Turn::Disown(const Node& node, const v1::RankReport& report, const Job* job) {
  if (report.state() == v1::RANK_STATE_GONE) return;
  const std::string name =
      absl::StrCat("rank ", report.ref().rank(), " of job ", report.ref().fence().job_id(),
                   " generation ", report.ref().fence().generation());
  if (job == nullptr) {
    Note(absl::StrCat("ORPHAN: worker ", node.record.worker(), " slot ", report.slot(), " runs ",
                      name, ", which is in no record; killed"));
  }
  SendStop(node, report.ref().fence(), absl::ZeroDuration(),
           job == nullptr ? "the coordinator knows no such job" : "superseded or ended");
}

void Turn::ApplyCurrent(Job& job, const v1::RankReport& report) {
  const int number = report.ref().rank();
  v1::RankRecord& rank = *job.attempt->record.mutable_ranks(number);
  RankSoftState& soft = job.attempt->soft[number];
  if (!report.address().empty()) soft.address = report.address();
  if (report.plan_hash() != 0) soft.plan_hash = report.plan_hash();
  const bool presumed = rank.state() == v1::RANK_STATE_PRESUMED_GONE;
  if (presumed ? report.state() == v1::RANK_STATE_GONE : report.state() > rank.state()) {
    if (rank.state() == v1::RANK_STATE_PLACED) job.attempt->last_launch = now_.boot;
    rank.set_state(report.state());
    if (report.state() >= v1::RANK_STATE_EXITED) NoteExit(job, report);
  }
  // The last steps before an end, when the session was closed to their Progress.
  if (report.last_step().step() > rank.last_report().step()) {
    *rank.mutable_last_report() = report.last_step();
    if (number == 0) out_.actions.push_back(PublishReport{job.record.id(), report.last_step()});
  }
  Advance(job);
  EndIfGone(job);
}

void Turn::NoteExit(Job& job, const v1::RankReport& report) {
  const int number = report.ref().rank();
  v1::RankRecord& rank = *job.attempt->record.mutable_ranks(number);
  const bool known = rank.has_exit_code() || rank.has_signal();
  if (report.has_exit_code()) rank.set_exit_code(report.exit_code());
  if (report.has_signal()) rank.set_signal(report.signal());
  Dirty(job);
  // GONE after EXITED is proof, not a second end.
  const bool failed = report.cause().kind() != v1::CAUSE_KIND_UNSPECIFIED || !IsFinished(rank);
  if (known && report.state() == v1::RANK_STATE_GONE) return;
  if (job.record.state() == v1::JOB_STATE_STOPPING) {
    if (job.record.intent() != v1::STOP_INTENT_FAIL || !failed) return;
    const v1::Cause cause = CauseOf(report, rank);
    if (!Explains(report, cause, job.record.cause())) return;
    *job.record.mutable_cause() = cause;
    return AddEvent(job, "CAUSE", cause.message());
  }
  if (failed) return Stop(job, v1::STOP_INTENT_FAIL, CauseOf(report, rank));
  if (job.record.state() == v1::JOB_STATE_STARTING && !RendezvousComplete(*job.attempt)) {
    Fail(job, v1::CAUSE_KIND_EXIT_CODE,
         absl::StrCat("rank ", number, " exited with code 0 before the ranks had met"), number);
  }
}

bool Turn::CheckPlanHashes(Job& job) {
  std::vector<int> wrong;
  for (size_t r = 0; r < job.attempt->soft.size(); ++r) {
    if (job.attempt->soft[r].plan_hash != job.plan->plan_hash()) wrong.push_back(r);
  }
  if (wrong.empty()) return true;
  Fail(job, v1::CAUSE_KIND_INTERNAL,
       absl::StrCat("the plan's hash is ", job.plan->plan_hash(), ", but ",
                    wrong.size() == 1 ? "rank " : "ranks ", absl::StrJoin(wrong, ", "),
                    " computed another one, rank ", wrong[0], " ",
                    job.attempt->soft[wrong[0]].plan_hash,
                    "; are coordinator and workers of one release?"),
       wrong[0]);
  return false;
}

void Turn::Advance(Job& job) {
  auto& ranks = job.attempt->record.ranks();
  if (job.record.state() == v1::JOB_STATE_STARTING && RendezvousComplete(*job.attempt)) {
    if (!CheckPlanHashes(job)) return;
    const bool all_running = std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) {
      return rank.state() >= v1::RANK_STATE_RUNNING;
    });
    if (all_running) {
      job.record.set_state(v1::JOB_STATE_RUNNING);
      job.record.set_started_unix_millis(now_.unix_millis);
      AddEvent(job, "RUNNING", "all ranks passed the first barrier");
    } else if (!job.attempt->peers_sent) {
      job.attempt->peers_sent = true;
      job.attempt->last_launch = now_.boot;  // the first barrier has the deadline of a start
      ResendJob(job, nullptr);
    }
  }
  if (job.record.state() == v1::JOB_STATE_RUNNING &&
      std::all_of(ranks.begin(), ranks.end(), IsFinished)) {
    Stop(job, v1::STOP_INTENT_SUCCEED, {});
  }
}

}  // namespace upipe::coordinator
