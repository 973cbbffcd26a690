// The worker's core under test, driven with invented events and a clock of its own.
#pragma once

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/agent/agent.h"

namespace upipe::worker {

// Drives the core with invented events and a clock of its own; keeps what it decided.
class Agent {
 public:
  Agent() {
    state.identity.set_worker("w1");
    state.identity.set_num_slots(4);
    Connect();
  }

  void Do(const Event& event) { actions = Step(state, event, now); }
  void After(absl::Duration duration) {
    now = now + duration;
    Do(Tick{});
  }
  void FromCoordinatorMessage(const v1::CoordinatorMessage& message) {
    Do(FromCoordinator{state.session, message});
  }

  void Connect(int64_t epoch = 1) {
    Do(Tick{});
    v1::CoordinatorMessage message;
    message.mutable_hello_ack()->set_epoch(epoch);
    FromCoordinatorMessage(message);
  }
  v1::Fence FenceOf(int64_t generation, const std::string& nonce, int64_t epoch = 1) {
    v1::Fence fence;
    fence.set_job_id("job");
    fence.set_generation(generation);
    fence.set_nonce(nonce);
    fence.set_epoch(epoch);
    return fence;
  }
  void Start(int64_t generation, const std::string& nonce, int rank, int slot, int64_t epoch = 1) {
    v1::CoordinatorMessage message;
    v1::StartRank& start = *message.mutable_start();
    *start.mutable_ref()->mutable_fence() = FenceOf(generation, nonce, epoch);
    start.mutable_ref()->set_rank(rank);
    start.set_slot(slot);
    for (int i = 0; i < 4; ++i) start.add_node_ids("n");
    FromCoordinatorMessage(message);
  }
  void Stop(int64_t generation, const std::string& nonce, absl::Duration grace,
            const std::vector<std::pair<int, int>>& placed = {}) {
    v1::CoordinatorMessage message;
    *message.mutable_stop()->mutable_fence() = FenceOf(generation, nonce);
    message.mutable_stop()->set_grace_millis(absl::ToInt64Milliseconds(grace));
    message.mutable_stop()->set_reason("cancelled");
    for (const auto& [rank, slot] : placed) {
      v1::RankSlot& place = *message.mutable_stop()->add_ranks();
      place.set_rank(rank);
      place.set_slot(slot);
    }
    FromCoordinatorMessage(message);
  }
  void AckRank(uint64_t sequence) {
    v1::CoordinatorMessage message;
    message.mutable_rank_ack()->set_sequence(sequence);
    FromCoordinatorMessage(message);
  }
  void AckHeartbeat(uint64_t sequence) {
    v1::CoordinatorMessage message;
    message.mutable_heartbeat_ack()->set_sequence(sequence);
    FromCoordinatorMessage(message);
  }
  // Started and attached, connection = rank + 1, pid = 100 + rank.
  void StartRunning(int64_t generation, const std::string& nonce, int rank, int slot) {
    Start(generation, nonce, rank, slot);
    Do(ProcessStarted{{nonce, rank}, 100 + rank});
    Attach(generation, nonce, rank, 100 + rank, static_cast<uint64_t>(rank) + 1);
    v1::TrainerMessage running;
    running.mutable_running();
    Do(FromTrainer{static_cast<uint64_t>(rank) + 1, running});
  }
  void Attach(int64_t generation, const std::string& nonce, int rank, int pid,
              uint64_t connection) {
    v1::TrainerMessage message;
    *message.mutable_hello()->mutable_ref()->mutable_fence() = FenceOf(generation, nonce);
    message.mutable_hello()->mutable_ref()->set_rank(rank);
    message.mutable_hello()->set_pid(pid);
    Do(FromTrainer{connection, message});
  }

  void Finish(int rank, absl::StatusCode code) {
    v1::TrainerMessage finished;
    finished.mutable_finished()->set_code(static_cast<int>(code));
    Do(FromTrainer{static_cast<uint64_t>(rank) + 1, finished});
  }
  // The read that is due, told by the heartbeat in the same step.
  v1::Heartbeat Look(const std::vector<v1::RankPosition>& positions) {
    EXPECT_TRUE(PositionsDue(state, now));
    Do(PositionsRead{{{"a", positions}}});
    const auto sent = Sent(v1::WorkerMessage::kHeartbeat);
    return sent.empty() ? v1::Heartbeat() : sent.back().heartbeat();
  }
  // The last message sent was a heartbeat or a report: acknowledges all of both.
  void AckAll() {
    for (const SendToCoordinator& send : All<SendToCoordinator>()) {
      if (send.message.has_heartbeat()) AckHeartbeat(send.message.sequence());
      if (send.message.has_rank()) AckRank(send.message.sequence());
    }
  }

  template <typename Kind>
  std::vector<Kind> All() const {
    std::vector<Kind> found;
    for (const Action& action : actions) {
      if (const auto* kind = std::get_if<Kind>(&action); kind != nullptr) found.push_back(*kind);
    }
    return found;
  }
  std::vector<int> Killed() const {
    std::vector<int> ranks;
    for (const KillRank& kill : All<KillRank>()) ranks.push_back(kill.key.rank);
    return ranks;
  }
  std::vector<v1::WorkerMessage> Sent(v1::WorkerMessage::KindCase kind) const {
    std::vector<v1::WorkerMessage> messages;
    for (const SendToCoordinator& send : All<SendToCoordinator>()) {
      if (send.message.kind_case() == kind) messages.push_back(send.message);
    }
    return messages;
  }
  v1::RankReport Reported(int rank) const {
    v1::RankReport report;
    for (const v1::WorkerMessage& message : Sent(v1::WorkerMessage::kRank)) {
      if (message.rank().ref().rank() == rank) report = message.rank();
    }
    return report;
  }

  State state;
  BootTime now{absl::Hours(1)};
  Actions actions;
};

inline v1::RankPosition At(int rank, int64_t collective) {
  v1::RankPosition position;
  position.set_rank(rank);
  position.set_changes(static_cast<uint64_t>(collective));
  position.set_step(7);
  position.set_pass("backward");
  position.set_layer(3);
  position.set_stage(-1);
  position.set_collective(collective);
  position.set_in_collective(true);
  return position;
}

}  // namespace upipe::worker
