#include "tests/sim/system/worker_machine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe::sim {

using worker::RankKey;

WorkerMachine::WorkerMachine(World& world, WorkerUplink& uplink, size_t index, int num_slots)
    : world_(world),
      uplink_(uplink),
      index_(index),
      name_(absl::StrCat("w", index)),
      slots_max_(num_slots),
      num_slots_(num_slots) {
  machine_.clock_base = absl::Hours(static_cast<int64_t>(1 + world_.Random(100)));
  machine_.clock_rate = 1 + (static_cast<double>(world_.Random(100)) - 50) / 50 * 0.004;
  daemon_.machine = &machine_;
}

// --- the daemon's life ---

void WorkerMachine::Boot() {
  if (up() || booting_) return;
  powered_ = true;
  booting_ = true;
  StartDaemon();
}

// Kills what the journal names, and comes to life once that is gone.
void WorkerMachine::StartDaemon() {
  for (const auto& [key, tree] : trees_) tree->Kill();
  if (!trees_.empty()) {
    return world_.After(daemon_, absl::Milliseconds(20), [this] { StartDaemon(); });
  }
  booting_ = false;
  num_slots_ = slots_max_;
  if (world_.Mishap(25)) num_slots_ = 1 + static_cast<int>(world_.Random(slots_max_));
  state_.emplace();
  ending_ = false;
  deadline_.reset();
  wake_at_.reset();
  v1::Hello& identity = state_->identity;
  identity.set_worker(name_);
  identity.set_node_id(name_);
  identity.set_incarnation(absl::StrCat(name_, "/", ++boots_));
  identity.set_state_id(name_);
  identity.set_start_number(static_cast<int64_t>(boots_));
  identity.set_num_slots(num_slots_);
  identity.set_memory_per_rank_bytes(1000);
  state_->leave_grace = absl::Seconds(5);
  state_->newest_generation = generations_;
  state_->reconnect_at = machine_.Clock(world_.now());
  Handle(worker::Tick{});
}

void WorkerMachine::CrashDaemon() {
  if (state_) uplink_.Hangup(index_, state_->session);  // as the kernel does
  booting_ = false;
  state_.reset();
  launches_.clear();
  daemon_.End();
  daemon_.stopped_until = Time();
  for (const auto& [key, tree] : trees_) tree->Kill();  // as the kernel does for a dead parent
}

void WorkerMachine::PowerOff() {
  CrashDaemon();
  powered_ = false;
  std::vector<Trainer*> running;
  for (const auto& [key, tree] : trees_) running.push_back(tree.get());
  for (Trainer* tree : running) tree->Vanish();
}

void WorkerMachine::Handle(const worker::Event& event) {
  if (!up()) return;
  const BootTime now = machine_.Clock(world_.now());
  if (worker::PositionsDue(*state_, now)) ReadPositions();
  StepAndCarry(event);
  if (state_->last_acknowledged) {
    deadline_ = *state_->last_acknowledged + state_->timing.autonomy;
  }
  uplink_.Stepped(index_);
  if (ending_) {
    CrashDaemon();
    return world_.After(world_.Millis(100, 4000), [this] { Boot(); });
  }
  Wake();
}

void WorkerMachine::StepAndCarry(const worker::Event& event) {
  world_.CountStep();
  const worker::Actions actions = worker::Step(*state_, event, machine_.Clock(world_.now()));
  for (const worker::Action& action : actions) {
    std::visit([this](const auto& kind) { Do(kind); }, action);
  }
}

void WorkerMachine::Wake() {
  const BootTime now = machine_.Clock(world_.now());
  const absl::Duration wait =
      std::max(absl::Milliseconds(1), machine_.Until(worker::NextWake(*state_, now), world_.now()));
  const Time at = world_.now() + wait;
  if (wake_at_ && *wake_at_ <= at && *wake_at_ > world_.now()) return;
  wake_at_ = at;
  world_.After(daemon_, wait, [this, at] {
    if (wake_at_ != at) return;
    wake_at_.reset();
    Handle(worker::Tick{});
  });
}

void WorkerMachine::ReadPositions() {
  worker::PositionsRead read;
  for (const auto& [key, rank] : state_->ranks) {
    if (!read.attempts.contains(key.nonce)) read.attempts[key.nonce] = PositionsOf(key.nonce);
  }
  StepAndCarry(read);
}

std::vector<v1::RankPosition> WorkerMachine::PositionsOf(const std::string& nonce) const {
  std::vector<v1::RankPosition> positions;
  for (auto at = trees_.lower_bound(RankKey{nonce, 0});
       at != trees_.end() && at->first.nonce == nonce; ++at) {
    positions.push_back(at->second->Position());
  }
  return positions;
}

// --- the network ---

void WorkerMachine::Deliver(uint64_t session, const v1::CoordinatorMessage& message) {
  Handle(worker::FromCoordinator{session, message});
}

void WorkerMachine::SessionEnded(uint64_t session, const std::string& reason) {
  Handle(worker::SessionClosed{session, reason});
}

// --- the launcher ---

void WorkerMachine::Do(const worker::LaunchRank& action) {
  launches_[action.key] = false;
  generations_[action.job] = std::max(generations_[action.job], action.generation);
  world_.After(daemon_, world_.Millis(0, 10), [this, action] { Fork(action); });
}

void WorkerMachine::Fork(const worker::LaunchRank& action) {
  const bool killed = launches_.at(action.key);
  launches_.erase(action.key);
  if ((killed && world_.Chance(50)) || world_.Mishap(1)) {
    return Handle(worker::ProcessLaunchFailed{action.key, absl::ResourceExhaustedError("no fork")});
  }
  Gang& gang = uplink_.GangOf(*state_->ranks.at(action.key).start);
  if (const Trainer* other = LiveIn(action.slot)) {
    world_.Violate(absl::StrCat(name_, " forks rank ", action.key.rank, " of ", action.job,
                                " in slot ", action.slot, ", where rank ", other->key().rank,
                                " of ", const_cast<Trainer*>(other)->gang().job_id, " lives"));
  }
  const int pid = next_pid_++;
  if (world_.verbose()) {
    world_.Trace(name_, absl::StrCat("forks rank ", action.key.rank, " of ", action.job,
                                     " generation ", action.generation, " in slot ", action.slot));
  }
  auto tree = std::make_unique<Trainer>(world_, *this, gang, action.key, action.slot, pid, pid);
  Trainer& trainer = *tree;
  trees_[action.key] = std::move(tree);
  gang.members[action.key.rank] = &trainer;
  uplink_.Launched(index_, trainer);
  trainer.Begin();
  world_.After(daemon_, world_.Millis(0, 15), [this, key = action.key, pid] {
    Handle(worker::ProcessStarted{key, pid});
  });
  if (killed) trainer.Kill();
}

void WorkerMachine::Do(const worker::KillRank& action) {
  if (action.fence_generation > 0) {
    generations_[action.job] = std::max(generations_[action.job], action.fence_generation);
  }
  if (const auto launch = launches_.find(action.key); launch != launches_.end()) {
    launch->second = true;
  }
  if (const auto tree = trees_.find(action.key); tree != trees_.end()) tree->second->Kill();
}

void WorkerMachine::Do(const worker::ReleaseRank& action) {
  if (trees_.contains(action.key)) {
    world_.Violate(absl::StrCat(name_, " releases slot ", action.slot, " and a process of rank ",
                                action.key.rank, " lives in it"));
  }
}

void WorkerMachine::TreeExited(Trainer& trainer) {
  world_.After(daemon_, world_.Millis(1, 10), [this, key = trainer.key(), exit = trainer.exit()] {
    Handle(worker::ProcessExited{key, exit, PositionsOf(key.nonce)});
  });
}

void WorkerMachine::TreeGone(Trainer& trainer) {
  const RankKey key = trainer.key();
  if (world_.verbose()) {
    world_.Trace(name_, absl::StrCat("rank ", key.rank, " of ", trainer.gang().job_id, " is gone"));
  }
  buried_.push_back(std::move(trees_.at(key)));
  trees_.erase(key);
  // Behind the exit, which took at most 10 ms to be told.
  world_.After(daemon_, world_.Millis(10, 20), [this, key] { Handle(worker::ProcessGone{key}); });
}

// --- trainers' streams ---

Trainer* WorkerMachine::OfConnection(uint64_t connection) const {
  for (const auto& [key, tree] : trees_) {
    if (tree->connection() == connection) return tree.get();
  }
  return nullptr;
}

void WorkerMachine::FromTrainer(uint64_t connection, v1::TrainerMessage message) {
  if (!up()) return;
  world_.After(daemon_, absl::Milliseconds(1), [this, connection, message = std::move(message)] {
    Handle(worker::FromTrainer{connection, message});
  });
}

void WorkerMachine::TrainerClosed(uint64_t connection) {
  if (!up()) return;
  world_.After(daemon_, absl::Milliseconds(1),
               [this, connection] { Handle(worker::TrainerClosed{connection}); });
}

void WorkerMachine::Do(const worker::SendToTrainer& action) {
  Trainer* trainer = OfConnection(action.connection);
  if (trainer == nullptr) return;
  world_.After(trainer->actor(), absl::Milliseconds(1),
               [trainer, command = action.command] { trainer->Take(command); });
}

void WorkerMachine::Do(const worker::CloseTrainer& action) {
  Trainer* trainer = OfConnection(action.connection);
  if (trainer == nullptr) return;
  world_.After(trainer->actor(), absl::Milliseconds(1), [trainer] { trainer->StreamClosed(); });
}

// --- looking at it ---

const Trainer* WorkerMachine::LiveIn(int slot) const {
  for (const auto& [key, tree] : trees_) {
    if (tree->slot() == slot) return tree.get();
  }
  return nullptr;
}

const Trainer* WorkerMachine::Find(const std::string& nonce, int rank) const {
  const auto found = trees_.find(RankKey{nonce, rank});
  return found == trees_.end() ? nullptr : found->second.get();
}

std::vector<Trainer*> WorkerMachine::Running() const {
  std::vector<Trainer*> running;
  for (const auto& [key, tree] : trees_) {
    if (tree->running()) running.push_back(tree.get());
  }
  return running;
}

}  // namespace upipe::sim
