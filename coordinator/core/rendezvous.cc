// A generation on its way: starts, the meeting of its ranks, what it resumes from, the checkpoints
// it commits, and success.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

// Where there are checkpoints, the one after the last step is part of the result.
bool IsFinalCommitted(const v1::JobSpec& spec, const v1::AttemptRecord& attempt) {
  if (spec.checkpoint().path().empty()) return true;
  return std::max(attempt.last_commit().step(), attempt.resume().step()) >= spec.train().steps();
}

}  // namespace

v1::Fence Turn::FenceOf(const SlotHolder& holder) {
  v1::Fence fence;
  fence.set_job_id(holder.job_id);
  fence.set_generation(holder.generation);
  fence.set_nonce(holder.nonce);
  return fence;
}

v1::Fence Turn::FenceOf(const Job& job) const {
  v1::Fence fence;
  fence.set_job_id(job.record.id());
  fence.set_generation(job.attempt->record.generation());
  fence.set_nonce(job.attempt->record.nonce());
  fence.set_epoch(state_.epoch);
  return fence;
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
  if (job.attempt->record.has_resume()) *peers.mutable_resume() = job.attempt->record.resume();
  Send(node, std::move(message));
}

bool Turn::CheckPlanHashes(Job& job) {
  std::vector<int> wrong;
  for (size_t r = 0; r < job.attempt->soft.size(); ++r) {
    if (job.attempt->soft[r].plan_hash != job.plan->plan_hash()) wrong.push_back(r);
  }
  if (Holds(Guard::kPlanHashEqual, wrong.empty())) return true;
  v1::Cause cause =
      MakeCause(v1::CAUSE_KIND_INTERNAL,
                absl::StrCat("the plan's hash is ", job.plan->plan_hash(), ", but ",
                             wrong.size() == 1 ? "rank " : "ranks ", absl::StrJoin(wrong, ", "),
                             " computed another one, rank ", wrong[0], " ",
                             job.attempt->soft[wrong[0]].plan_hash,
                             "; are coordinator and workers of one release?"));
  cause.set_rank(wrong[0]);
  cause.set_node(job.attempt->record.ranks(wrong[0]).worker());
  Fired(Row::kStartFailed);
  // Another attempt computes the same.
  Stop(job, v1::STOP_INTENT_FAIL, std::move(cause), absl::ZeroDuration());
  return false;
}

// Chooses once what all ranks go on from; durable before the address table leaves. False when rank
// 0 proposes what it cannot have found.
bool Turn::DecideResume(Job& job) {
  v1::AttemptRecord& attempt = job.attempt->record;
  if (!Holds(Guard::kResumeOnce, !attempt.resume_decided())) return true;
  const std::optional<v1::CheckpointRef>& proposal = job.attempt->soft[0].proposal;
  if (proposal && !Holds(Guard::kProposalIsOlder, proposal->generation() < attempt.generation())) {
    Fired(Row::kStartFailed);
    Restart(job, v1::CAUSE_KIND_INTERNAL,
            absl::StrCat("rank 0 proposes a checkpoint of generation ", proposal->generation(),
                         ", this is generation ", attempt.generation(),
                         "; do two services share the checkpoint folder?"),
            0);
    return false;
  }
  attempt.set_resume_decided(true);
  attempt.clear_resume();
  if (proposal) {
    *attempt.mutable_resume() = *proposal;
    // Its writer may have ended before it told of it; what was newer is not whole. Only to a
    // restored store is it news when the generation has made its own since.
    if (!attempt.has_last_commit()) {
      if (proposal->manifest_sha256() != job.record.last_commit().manifest_sha256()) {
        job.record.set_last_commit_unix_millis(now_.unix_millis);
      }
      *job.record.mutable_last_commit() = *proposal;
    }
  }
  Fired(Row::kResumeCommitted);
  Dirty(job);
  if (job.record.spec().checkpoint().path().empty()) return true;
  AddEvent(job, "RESUME",
           proposal ? absl::StrCat("goes on after step ", proposal->step(),
                                   ", from the checkpoint of generation ", proposal->generation())
                    : "begins at step 1: there is no whole checkpoint");
  return true;
}

void Turn::Advance(Job& job) {
  const auto& ranks = job.attempt->record.ranks();
  const auto& soft = job.attempt->soft;
  const bool all_ready =
      std::all_of(soft.begin(), soft.end(), [](const auto& rank) { return !rank.address.empty(); });
  if (job.record.state() == v1::JOB_STATE_STARTING && Holds(Guard::kAllReady, all_ready)) {
    if (!CheckPlanHashes(job) || !DecideResume(job)) return;
    const bool all_running = std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) {
      return rank.state() >= v1::RANK_STATE_RUNNING;
    });
    if (all_running) {
      job.record.set_state(v1::JOB_STATE_RUNNING);
      NoteRunning(job);
      Fired(Row::kFirstBarrier);
      AddEvent(job, "RUNNING", "all ranks passed the first barrier");
    } else if (!job.attempt->peers_sent) {
      job.attempt->peers_sent = true;
      job.attempt->last_launch = now_.boot;  // the first barrier has the deadline of a start
      ResendJob(job, nullptr);
    }
  }
  if (job.record.state() != v1::JOB_STATE_RUNNING && job.record.state() != v1::JOB_STATE_STOPPING) {
    return;
  }
  if (!std::all_of(ranks.begin(), ranks.end(), IsFinished)) return;
  // Exit code 0 alone is no success. No rank is further than the others: each step needs them all.
  const int64_t step = std::max(ranks[0].last_report().step(), job.attempt->record.resume().step());
  if (step < job.record.spec().train().steps()) return;
  const bool final = IsFinalCommitted(job.record.spec(), job.attempt->record);
  if (Holds(Guard::kFinalManifest, final)) {
    if (job.record.intent() != v1::STOP_INTENT_SUCCEED) Fired(Row::kAllFinished);
    return Stop(job, v1::STOP_INTENT_SUCCEED, {}, absl::ZeroDuration());
  }
  // Nobody is left who could tell of it.
  if (ranks[0].state() >= v1::RANK_STATE_GONE && job.record.state() == v1::JOB_STATE_RUNNING) {
    Fired(Row::kRunFailed);
    Restart(job, v1::CAUSE_KIND_INTERNAL,
            absl::StrCat("all ranks exited with code 0, but no checkpoint of step ",
                         job.record.spec().train().steps(), " is committed"),
            0);
  }
}

void Turn::NoteCommit(Job& job, const v1::CheckpointRef& commit) {
  v1::AttemptRecord& attempt = job.attempt->record;
  if (commit.generation() != attempt.generation()) return;
  if (!Holds(Guard::kCommitIsNewer, commit.step() > attempt.last_commit().step())) return;
  *attempt.mutable_last_commit() = commit;
  *job.record.mutable_last_commit() = commit;
  job.record.set_last_commit_unix_millis(now_.unix_millis);
  ++state_.tally.commits;
  // It holds what was done until its step boundary.
  CountTime(job, state_.tally.kept_seconds,
            now_.boot + -absl::Seconds(std::max(0.0, commit.write_seconds())));
  Fired(Row::kCheckpointCommitted);
  Dirty(job);
  SendRetain(job, nullptr);
}

// Older files go only on this order, and only by the generation that lives. At its start it is for
// what it goes on from: the order to the generation before may have died with it.
void Turn::SendRetain(const Job& job, const Node* only) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const v1::RankRecord& rank = attempt.ranks(0);
  const Node* node = FindNode(rank.worker());
  if (node == nullptr || (only != nullptr && node != only)) return;
  if (rank.state() >= v1::RANK_STATE_EXITED) return;
  if (!attempt.has_last_commit() && !attempt.has_resume()) return;
  v1::CoordinatorMessage message;
  v1::RetainCheckpoints& retain = *message.mutable_retain();
  *retain.mutable_fence() = FenceOf(job);
  *retain.mutable_newest() = attempt.has_last_commit() ? attempt.last_commit() : attempt.resume();
  retain.set_keep(job.record.spec().checkpoint().keep());
  Send(*node, std::move(message));
}

}  // namespace upipe::coordinator
