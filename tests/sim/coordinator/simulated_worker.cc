#include "tests/sim/coordinator/simulated_worker.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace upipe::coordinator {

absl::Duration SimulatedWorker::Soon() { return absl::Milliseconds(1 + world_.random() % 300); }

void SimulatedWorker::Send(v1::WorkerMessage message) {
  if (!send_) return;
  message.set_sequence(++sequence_);
  send_(std::move(message));
}

void SimulatedWorker::Connect(std::function<void(v1::WorkerMessage)> send) {
  send_ = std::move(send);
  greeted_ = false;
  sequence_ = 0;
  heartbeats_.clear();
  reports_.clear();
  v1::WorkerMessage message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_worker(name_);
  hello.set_node_id(name_);
  hello.set_incarnation(absl::StrCat(name_, "-", incarnation_));
  hello.set_num_slots(slots_);
  hello.set_memory_per_rank_bytes(1000);
  hello.set_epoch(epoch_);
  for (auto& [key, rank] : ranks_) {
    rank.acknowledged = false;
    *hello.add_ranks() = rank.report;
  }
  Send(std::move(message));
  heartbeats_[sequence_] = world_.now();
}

void SimulatedWorker::Beat() {
  if (!up_) return;
  if (acknowledged_ && world_.now() >= *acknowledged_ + timing_.autonomy) {
    std::map<std::string, bool> nonces;
    for (const auto& [key, rank] : ranks_) nonces[key.first] = true;
    for (const auto& [nonce, unused] : nonces) Kill(nonce);
  }
  if (!send_ || !greeted_) return;
  for (const auto& [key, rank] : ranks_) {
    if (rank.acknowledged) continue;
    v1::WorkerMessage message;
    *message.mutable_rank() = rank.report;
    Send(std::move(message));
    reports_[sequence_] = {key, rank.version};
  }
  v1::WorkerMessage heartbeat;
  heartbeat.mutable_heartbeat();
  Send(std::move(heartbeat));
  heartbeats_[sequence_] = world_.now();
}

void SimulatedWorker::Crash() {
  up_ = false;
  send_ = nullptr;
  ranks_.clear();
  acknowledged_.reset();
}

void SimulatedWorker::Boot() {
  up_ = true;
  ++incarnation_;
}

bool SimulatedWorker::IsAlive(const std::string& nonce, int rank) const {
  const auto found = ranks_.find({nonce, rank});
  return found != ranks_.end() && found->second.report.state() < v1::RANK_STATE_EXITED;
}

bool SimulatedWorker::IsSlotAlive(int slot) const {
  for (const auto& [key, rank] : ranks_) {
    if (rank.report.slot() == slot && rank.report.state() < v1::RANK_STATE_EXITED) return true;
  }
  return false;
}

void SimulatedWorker::Receive(const v1::CoordinatorMessage& message) {
  switch (message.kind_case()) {
    case v1::CoordinatorMessage::kHelloAck:
      if (message.hello_ack().epoch() < epoch_) world_.violation("a lower epoch was acknowledged");
      epoch_ = message.hello_ack().epoch();
      greeted_ = true;
      acknowledged_ = heartbeats_.at(1);
      return;
    case v1::CoordinatorMessage::kHeartbeatAck: {
      const auto sent = heartbeats_.find(message.heartbeat_ack().sequence());
      if (sent == heartbeats_.end()) return;
      acknowledged_ = std::max(*acknowledged_, sent->second);
      heartbeats_.erase(heartbeats_.begin(), std::next(sent));
      return;
    }
    case v1::CoordinatorMessage::kRankAck: {
      const auto sent = reports_.find(message.rank_ack().sequence());
      if (sent == reports_.end()) return;
      const auto rank = ranks_.find(sent->second.first);
      if (rank == ranks_.end() || rank->second.version != sent->second.second) return;
      rank->second.acknowledged = true;
      if (rank->second.report.state() == v1::RANK_STATE_GONE) ranks_.erase(rank);
      return;
    }
    case v1::CoordinatorMessage::kStart:
      return Start(message.start());
    case v1::CoordinatorMessage::kPeers:
      for (auto& [key, rank] : ranks_) {
        if (key.first != message.peers().fence().nonce()) continue;
        if (rank.report.state() == v1::RANK_STATE_READY) Move(key, v1::RANK_STATE_RUNNING);
      }
      return;
    case v1::CoordinatorMessage::kStop:
      return Kill(message.stop().fence().nonce());
    default:
      return;
  }
}

void SimulatedWorker::Start(const v1::StartRank& start) {
  const Key key{start.ref().fence().nonce(), start.ref().rank()};
  if (ranks_.contains(key)) return;
  for (const auto& [other, rank] : ranks_) {
    if (rank.report.slot() == start.slot() && rank.report.state() != v1::RANK_STATE_GONE) {
      world_.violation(absl::StrCat("Start of ", key.first, " in slot ", start.slot(), " of ",
                                    name_, ", where ", other.first, " is not proven gone"));
    }
  }
  Rank& rank = ranks_[key];
  *rank.report.mutable_ref() = start.ref();
  rank.report.set_slot(start.slot());
  rank.report.set_state(v1::RANK_STATE_STARTED);
  Later(Soon(), key, [this, key, start](Rank& started) {
    if (started.report.state() != v1::RANK_STATE_STARTED) return;
    if (*world_.faults && world_.random() % 20 == 0) return Exit(key, started, 1);
    started.report.set_address(absl::StrCat("address of ", key.second));
    started.report.set_plan_hash(start.plan().plan_hash());
    Move(key, v1::RANK_STATE_READY);
  });
}

void SimulatedWorker::Later(absl::Duration delay, const Key& key, std::function<void(Rank&)> then) {
  world_.after(delay, [this, key, then = std::move(then), incarnation = incarnation_] {
    const auto rank = ranks_.find(key);
    if (up_ && incarnation == incarnation_ && rank != ranks_.end()) then(rank->second);
  });
}

void SimulatedWorker::Move(const Key& key, v1::RankState state) {
  Rank& rank = ranks_.at(key);
  rank.report.set_state(state);
  ++rank.version;
  rank.acknowledged = false;
  if (state == v1::RANK_STATE_RUNNING) {
    const absl::Duration length = absl::Milliseconds(200 + world_.random() % 8000);
    const int code = *world_.faults && world_.random() % 20 == 0 ? 3 : 0;
    Later(length, key, [this, key, code](Rank& running) {
      if (running.report.state() == v1::RANK_STATE_RUNNING) Exit(key, running, code);
    });
  }
  if (state == v1::RANK_STATE_EXITED) {
    Later(Soon(), key, [this, key](Rank&) { Move(key, v1::RANK_STATE_GONE); });
  }
}

void SimulatedWorker::Exit(const Key& key, Rank& rank, int exit_code) {
  rank.report.set_exit_code(exit_code);
  if (exit_code == 0) exited_zero_[key] = true;
  Move(key, v1::RANK_STATE_EXITED);
  if (exit_code != 0) Kill(key.first);
}

void SimulatedWorker::Kill(const std::string& nonce) {
  for (auto& [key, rank] : ranks_) {
    if (key.first != nonce || rank.report.state() >= v1::RANK_STATE_EXITED) continue;
    rank.report.set_signal(9);
    rank.report.set_signal_sent_by_worker(true);
    Move(key, v1::RANK_STATE_EXITED);
  }
}

}  // namespace upipe::coordinator
