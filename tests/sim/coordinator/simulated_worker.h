// A worker as the control plane describes it, on simulated time, without processes: ranks are
// numbers that end by chance. It also knows the truth the coordinator can only be told: which rank
// is alive in which slot.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "coordinator/core/timing.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

class SimulatedWorker {
 public:
  struct World {
    std::mt19937_64& random;
    std::function<absl::Duration()> now;
    std::function<void(absl::Duration delay, std::function<void()>)> after;
    std::function<void(std::string)> violation;
    bool* faults;  // ranks fail by chance while true
  };
  SimulatedWorker(World world, Timing timing, std::string name, int slots)
      : world_(std::move(world)), timing_(timing), name_(std::move(name)), slots_(slots) {}

  // The session this worker speaks on, opened by the cluster; `send` takes its messages.
  void Connect(std::function<void(v1::WorkerMessage)> send);
  void Disconnect() { send_ = nullptr; }
  void Receive(const v1::CoordinatorMessage& message);
  // Every H: heartbeat, reports not acknowledged, the deadline of autonomy.
  void Beat();
  // kill -9: its ranks die with it.
  void Crash();
  void Boot();

  bool up() const { return up_; }
  bool connected() const { return send_ != nullptr; }
  const std::string& name() const { return name_; }
  int num_slots() const { return slots_; }
  // Whether a rank of this attempt is alive.
  bool IsAlive(const std::string& nonce, int rank) const;
  bool IsSlotAlive(int slot) const;
  bool ExitedZero(const std::string& nonce, int rank) const {
    return exited_zero_.contains({nonce, rank});
  }

 private:
  using Key = std::pair<std::string, int>;  // nonce, rank
  struct Rank {
    v1::RankReport report;
    uint64_t version = 1;
    bool acknowledged = false;
  };
  void Start(const v1::StartRank& start);
  void Kill(const std::string& nonce);
  void Move(const Key& key, v1::RankState state);
  void Later(absl::Duration delay, const Key& key, std::function<void(Rank&)> then);
  void Exit(const Key& key, Rank& rank, int exit_code);
  void Send(v1::WorkerMessage message);
  absl::Duration Soon();

  World world_;
  const Timing timing_;
  const std::string name_;
  const int slots_;
  bool up_ = true;
  int incarnation_ = 1;
  int64_t epoch_ = 0;
  uint64_t sequence_ = 0;
  bool greeted_ = false;  // HelloAck came on this session
  std::map<uint64_t, absl::Duration> heartbeats_;
  std::map<uint64_t, std::pair<Key, uint64_t>> reports_;
  std::optional<absl::Duration> acknowledged_;  // send time of the last acknowledged heartbeat
  std::map<Key, Rank> ranks_;
  std::map<Key, bool> exited_zero_;
  std::function<void(v1::WorkerMessage)> send_;
};

}  // namespace upipe::coordinator
