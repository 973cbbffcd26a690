#include "tests/sim/system/gang.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::sim {
namespace {

constexpr uint64_t kPlanHash = 77;
constexpr int64_t kFirstBarrier = 2;  // collective: connected, restored, then the step boundaries

}  // namespace

bool Gang::Has(const std::string& worker) const {
  return std::any_of(members.begin(), members.end(), [&](const Trainer* member) {
    return member != nullptr && const_cast<Trainer*>(member)->host().name() == worker;
  });
}

Trainer::Trainer(World& world, TrainerHost& host, Gang& gang, worker::RankKey key, int slot,
                 int pid, uint64_t connection)
    : world_(world),
      host_(host),
      gang_(gang),
      key_(std::move(key)),
      slot_(slot),
      pid_(pid),
      connection_(connection),
      boot_(host.boots()),
      actor_{&host.machine(), {}, 1} {}

void Trainer::Send(v1::TrainerMessage message) {
  if (running()) host_.FromTrainer(connection_, std::move(message));
}

void Trainer::Moved(const char* pass) {
  pass_ = pass;
  ++changes_;
}

v1::RankPosition Trainer::Position() const {
  v1::RankPosition position;
  position.set_rank(key_.rank);
  position.set_changes(changes_);
  position.set_step(step_);
  position.set_pass(pass_);
  position.set_layer(-1);
  position.set_stage(-1);
  position.set_collective(collective_);
  position.set_in_collective(in_collective_);
  return position;
}

// --- to the first barrier ---

void Trainer::Begin() {
  world_.After(actor_, world_.Millis(1, 30), [this] {
    v1::TrainerMessage message;
    v1::Fence& fence = *message.mutable_hello()->mutable_ref()->mutable_fence();
    fence.set_job_id(gang_.job_id);
    fence.set_generation(gang_.generation);
    fence.set_nonce(gang_.nonce);
    message.mutable_hello()->mutable_ref()->set_rank(key_.rank);
    message.mutable_hello()->set_pid(pid_);
    Send(std::move(message));
  });
}

void Trainer::Take(const v1::WorkerCommand& command) {
  if (!running()) return;
  if (command.has_assignment() && phase_ == Phase::kStarting) Restore();
  if (command.has_peers() && phase_ == Phase::kReady && !met_) Meet(command.peers());
  if (command.has_stop()) {
    stop_requested_ = true;
    if (phase_ < Phase::kMeeting) Leave(absl::StatusCode::kCancelled, "asked to stop");
  }
  if (command.has_retain() && gang_.folder != nullptr) {
    gang_.folder->Retain(KeyOf(command.retain().newest()), command.retain().keep());
  }
}

void Trainer::Restore() {
  phase_ = Phase::kRestoring;
  if (gang_.folder != nullptr) {
    Moved("restoring");
    if (key_.rank == 0) {
      JobFolder& folder = *gang_.folder;
      if (folder.owner_generation > gang_.generation) {
        return Leave(absl::StatusCode::kAborted, "a higher generation owns the folder");
      }
      folder.owner_generation = gang_.generation;
      folder.owner_nonce = gang_.nonce;
    }
  }
  if (gang_.deaf_rank == key_.rank) return;
  if (gang_.short_rank == key_.rank) {
    return world_.After(actor_, world_.Millis(1, 100), [this] { FallShort(); });
  }
  world_.After(actor_, world_.Millis(5, 200), [this] { GetReady(); });
}

void Trainer::GetReady() {
  phase_ = Phase::kReady;
  SendReady();
  if (key_.rank != 0 || gang_.folder == nullptr || !world_.Mishap(2)) return;
  world_.After(actor_, world_.Millis(5, 60), [this] {
    gang_.folder->Damage();
    ProposeAgain();
  });
}

void Trainer::SendReady() {
  v1::TrainerMessage message;
  v1::TrainerReady& ready = *message.mutable_ready();
  ready.set_address(absl::StrCat(key_.nonce, "/", key_.rank));
  ready.set_plan_hash(gang_.wrong_hash_rank == key_.rank ? kPlanHash + 1 : kPlanHash);
  if (key_.rank == 0 && gang_.folder != nullptr) {
    std::vector<StepKey> passed_over;
    const std::optional<StepKey> newest = gang_.folder->Newest(&passed_over);
    if (newest) *ready.mutable_resume() = RefOf(gang_.job_id, *newest);
    for (const StepKey& key : passed_over) {
      v1::CheckpointProblem& problem = *ready.add_passed_over();
      problem.set_generation(key.first);
      problem.set_step(key.second);
      problem.set_message("passed over: damaged");
    }
  }
  Send(std::move(message));
}

// It looked once more: a trainer of another release might.
void Trainer::ProposeAgain() {
  if ((phase_ == Phase::kReady || phase_ == Phase::kMeeting) && key_.rank == 0) SendReady();
}

void Trainer::Meet(const v1::Peers& peers) {
  met_ = true;
  if (peers.has_resume()) resume_ = KeyOf(peers.resume());
  if (gang_.folder != nullptr && gang_.folder->owner_nonce != gang_.nonce) {
    return Leave(absl::StatusCode::kFailedPrecondition, "another generation owns the folder");
  }
  phase_ = Phase::kMeeting;
  WatchDeadline();
  world_.After(actor_, world_.Millis(1, 20), [this] { Arrive(false); });
}

// All are connected: each restores exactly what was committed.
void Trainer::FirstBarrier() {
  if (!restored_) {
    restored_ = true;
    Moved("restoring");
    if (resume_ && !gang_.folder->IsWhole(*resume_)) {
      return Leave(absl::StatusCode::kDataLoss, "what was committed as resume is damaged");
    }
    if (resume_) step_ = written_step_ = resume_->second;
    return world_.After(actor_, world_.Millis(1, 60), [this] { Arrive(false); });
  }
  ran_ = true;
  phase_ = Phase::kTraining;
  v1::TrainerMessage message;
  message.mutable_running();
  Send(std::move(message));
  if (!LeftByDeadline()) Boundary();
}

// --- deadline ---

bool Trainer::IsPastDeadline() const {
  const std::optional<BootTime> deadline = host_.deadline();
  return deadline && host_.machine().Clock(world_.now()) >= *deadline;
}

bool Trainer::can_run() const { return running() && !kill_due_ && !IsPastDeadline(); }

bool Trainer::LeftByDeadline() {
  if (!IsPastDeadline()) return false;
  Leave(absl::StatusCode::kAborted, "left: the worker's deadline passed");
  return true;
}

void Trainer::WatchDeadline() {
  if (LeftByDeadline()) return;
  const std::optional<BootTime> deadline = host_.deadline();
  const absl::Duration left =
      deadline ? host_.machine().Until(*deadline, world_.now()) : absl::Seconds(1);
  world_.After(actor_, left + absl::Milliseconds(50), [this] {
    if (running()) WatchDeadline();
  });
}

// --- collectives ---

void Trainer::Arrive(bool vote) {
  if (!running() || phase_ == Phase::kLeaving) return;
  in_collective_ = true;
  ++collective_;
  ++changes_;
  gang_.vote |= vote;
  gang_.arrived.insert(key_.rank);
  TryCollective();
}

void Trainer::TryCollective() {
  Gang& gang = gang_;
  if (gang.stuck || static_cast<int>(gang.arrived.size()) < gang.ranks()) return;
  Time reachable;
  for (const Trainer* member : gang.members) {
    if (member == nullptr || !member->running() || member->phase_ == Phase::kLeaving) return;
    reachable = std::max(reachable, member->actor_.machine->isolated_until);
  }
  if (reachable > world_.now()) {
    if (gang.retry_due) return;
    gang.retry_due = true;
    return world_.After(reachable - world_.now(), [this] {
      gang_.retry_due = false;
      TryCollective();
    });
  }
  gang.arrived.clear();
  const bool vote = std::exchange(gang.vote, false);
  ++gang.collective;
  CheckNewest();
  for (Trainer* member : gang.members) {
    world_.After(member->actor_, world_.Millis(0, 3), [member, vote] { member->Released(vote); });
  }
}

// The gang passes a barrier when its last rank enters it. A rank that stands still meanwhile learns
// of it later, when the others may be gone and a newer generation runs: alone it reaches no other.
void Trainer::CheckNewest() {
  if (gang_.collective < kFirstBarrier) return;
  int64_t& newest = (*gang_.newest_running)[gang_.job_id];
  if (gang_.generation < newest) {
    world_.Violate(absl::StrCat(gang_.job_id, ": generation ", gang_.generation,
                                gang_.collective == kFirstBarrier
                                    ? " passed its first barrier after "
                                    : " passed a step boundary after ",
                                newest, " ran"));
  }
  newest = std::max(newest, gang_.generation);
}

void Trainer::Released(bool vote) {
  if (!running() || phase_ == Phase::kLeaving) return;
  in_collective_ = false;
  ++changes_;
  if (!ran_) return FirstBarrier();
  AtBoundary(vote);
}

void Trainer::NotePeerFailure() {
  world_.After(actor_, world_.Millis(20, 1500), [this] {
    Leave(absl::StatusCode::kUnavailable, "a peer is lost", /*peer_failure=*/true);
  });
}

// --- steps ---

void Trainer::Boundary() {
  Moved("boundary");
  Arrive(stop_requested_);
}

void Trainer::AtBoundary(bool vote) {
  const bool last = step_ >= gang_.steps();
  const v1::CheckpointSpec& spec = gang_.spec.checkpoint();
  const bool due = last || vote || step_ % spec.every_steps() == 0;
  if (gang_.folder != nullptr && due && step_ > written_step_) Write(step_);
  if (last) return LeaveWhenWritten(absl::StatusCode::kOk);
  if (vote) return LeaveWhenWritten(absl::StatusCode::kCancelled);
  if (LeftByDeadline()) return;
  Moved("forward");
  world_.After(actor_, gang_.step_time * (0.8 + 0.4 * world_.Random(100) / 100.0),
               [this] { TakeStep(); });
}

void Trainer::TakeStep() {
  if (phase_ != Phase::kTraining) return;
  ++step_;
  v1::TrainerMessage message;
  v1::StepReport& report = *message.mutable_report();
  report.set_step(step_);
  report.set_total_steps(gang_.steps());
  report.set_step_seconds(absl::ToDoubleSeconds(gang_.step_time));
  Send(std::move(message));
  if (!LeftByDeadline()) Boundary();
}

// --- checkpoints ---

// One at a time, in the background.
void Trainer::Write(int64_t step) {
  if (writing_) {
    next_write_ = step;
    return;
  }
  writing_ = true;
  write_failed_ = false;
  written_step_ = step;
  world_.After(actor_, world_.Millis(2, 150), [this, step] { WriteSummary(step); });
}

void Trainer::WriteSummary(int64_t step) {
  const bool lost = gang_.forgets_final && step == gang_.steps();
  if (lost || world_.Mishap(1)) return WriterDone(step, "no space left");
  gang_.folder->summaries[{gang_.generation, step}].insert(key_.rank);
  if (key_.rank != 0) {
    Trainer* first = gang_.members[0];
    WriterDone(step, "");
    if (first != nullptr && first->running()) first->CommitIfWhole(step);
    return;
  }
  CommitIfWhole(step);
  world_.After(actor_, absl::Seconds(1), [this, step] {
    if (writing_ && written_step_ == step) WriterDone(step, "a summary did not come");
  });
}

// Rank 0's writer thread puts the manifest in its place, if it still may.
void Trainer::CommitIfWhole(int64_t step) {
  const StepKey key{gang_.generation, step};
  if (!writing_ || written_step_ != step) return;
  if (static_cast<int>(gang_.folder->summaries[key].size()) < gang_.ranks()) return;
  world_.After(actor_, world_.Millis(1, 40), [this, key] {
    if (!writing_ || written_step_ != key.second) return;
    JobFolder& folder = *gang_.folder;
    if (folder.owner_nonce != gang_.nonce) {
      return WriterDone(key.second, "another generation owns the folder");
    }
    if (LeftByDeadline()) return;
    const int64_t newest = gang_.newest_running->at(gang_.job_id);
    if (key.first < newest) {
      world_.Violate(absl::StrCat(gang_.job_id, ": generation ", key.first,
                                  " put a manifest in its place while ", newest, " runs"));
    }
    folder.manifests[key] = false;
    folder.ever_committed.insert(key);
    v1::TrainerMessage message;
    *message.mutable_committed() = RefOf(gang_.job_id, key);
    Send(std::move(message));
    WriterDone(key.second, "");
  });
}

void Trainer::WriterDone(int64_t step, const std::string& problem) {
  writing_ = false;
  write_failed_ = !problem.empty();
  if (write_failed_) {
    v1::TrainerMessage message;
    message.mutable_problem()->set_generation(gang_.generation);
    message.mutable_problem()->set_step(step);
    message.mutable_problem()->set_message(problem);
    Send(std::move(message));
  }
  if (next_write_ > 0) return Write(std::exchange(next_write_, 0));
  if (leave_code_) LeaveWhenWritten(*leave_code_);
}

// --- the end ---

void Trainer::LeaveWhenWritten(absl::StatusCode code) {
  leave_code_ = code;
  if (writing_) return Moved("checkpoint");
  if (code == absl::StatusCode::kOk && gang_.folder != nullptr && write_failed_ &&
      !gang_.forgets_final) {
    return Leave(absl::StatusCode::kUnavailable, "the last checkpoint was not written");
  }
  Leave(code, code == absl::StatusCode::kOk ? "" : "asked to stop");
}

void Trainer::Leave(absl::StatusCode code, const std::string& why, bool peer_failure) {
  if (!running() || phase_ == Phase::kLeaving) return;
  phase_ = Phase::kLeaving;
  left_well_ = code == absl::StatusCode::kOk;
  v1::TrainerMessage message;
  message.mutable_finished()->set_code(static_cast<int>(code));
  message.mutable_finished()->set_message(why);
  message.mutable_finished()->set_peer_failure(peer_failure);
  Send(std::move(message));
  world_.After(actor_, world_.Millis(1, 30),
               [this, code] { Exit(code == absl::StatusCode::kOk ? 0 : 1); });
}

void Trainer::FallShort() {
  if (!running() || phase_ == Phase::kLeaving) return;
  phase_ = Phase::kLeaving;
  v1::TrainerMessage message;
  v1::TrainerFinished& finished = *message.mutable_finished();
  finished.set_code(static_cast<int>(absl::StatusCode::kResourceExhausted));
  finished.set_message("attention_bwd takes 9 bytes of scratch, 5 are planned");
  v1::MeasuredWorkspaces::Op& op = *finished.mutable_measured()->add_ops();
  op.set_op("attention_bwd");
  op.set_counted_bytes(5);
  op.set_measured_bytes(9);
  Send(std::move(message));
  world_.After(actor_, world_.Millis(1, 30), [this] { Exit(1); });
}

void Trainer::Kill() {
  if (!running() || kill_due_) return;
  kill_due_ = true;
  const absl::Duration late = std::max(world_.Millis(0, 2), survives_kill_until_ - world_.now());
  Stop(late + absl::Seconds(1));  // it runs no more, however long it stays
  world_.After(late, [this] {
    if (running()) Die(SIGKILL);
  });
}

void Trainer::Stop(absl::Duration how_long) {
  actor_.stopped_until = std::max(actor_.stopped_until, world_.now() + how_long);
}

void Trainer::Die(int signal, const std::string& oom_evidence) {
  if (!running()) return;
  exit_.signal = signal;
  exit_.oom_evidence = oom_evidence;
  exit_.oom_counters_known = true;
  exit_.died_before_kill = !kill_due_;
  End();
}

void Trainer::Exit(int code) {
  if (!running()) return;
  exit_.exit_code = code;
  exit_.died_before_kill = true;
  End();
}

void Trainer::Vanish() {
  if (running()) {
    phase_ = Phase::kEnded;
    exit_.signal = SIGKILL;
    actor_.End();
  }
  if (phase_ == Phase::kGone) return;
  phase_ = Phase::kGone;
  host_.TreeGone(*this);
}

void Trainer::End() {
  phase_ = Phase::kEnded;
  actor_.End();
  host_.TrainerClosed(connection_);
  host_.TreeExited(*this);
  if (!finished()) {
    for (Trainer* member : gang_.members) {
      if (member == nullptr || !member->running() || &member->host_ == &host_) continue;
      if (member->phase_ == Phase::kTraining && world_.Chance(50)) member->NotePeerFailure();
    }
  }
  world_.After(world_.Millis(1, 20) + strays_, [this] {
    if (phase_ == Phase::kGone) return;
    phase_ = Phase::kGone;
    host_.TreeGone(*this);
  });
}

}  // namespace upipe::sim
