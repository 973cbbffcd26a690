// The coordinator's core with invented workers, network, disk and clients on one simulated clock,
// driven by one seed. Invariants are checked after every event.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "coordinator/core/state.h"
#include "coordinator/store/memory_store.h"
#include "tests/sim/coordinator/simulated_worker.h"

namespace upipe::coordinator {

class Cluster {
 public:
  struct Outcome {
    std::vector<std::string> violations;  // the first few, with the time
    int succeeded = 0, failed = 0, cancelled = 0;
    int coordinator_crashes = 0, worker_crashes = 0, breaks = 0;
    int64_t events = 0;
  };
  explicit Cluster(uint64_t seed);
  // Faults for `faulty`, then none until every job has ended.
  Outcome Run(absl::Duration faulty);

 private:
  struct Session {
    size_t worker = 0;
    bool broken = false;
    absl::Duration last_up, last_down;  // streams deliver in order
  };
  struct Pending {
    std::vector<Batch> batches;
    std::vector<Action> actions;
  };

  void After(absl::Duration delay, std::function<void()> run) {
    queue_.emplace(std::make_pair(now_ + delay, next_event_++), std::move(run));
  }
  bool Chance(int percent) { return static_cast<int>(random_() % 100) < percent; }
  absl::Duration Delay() { return absl::Milliseconds(1 + random_() % (Chance(5) ? 400 : 20)); }
  Moment Now() const { return {{absl::Hours(1) + now_}, absl::ToInt64Milliseconds(now_)}; }
  void Violation(const std::string& text);

  void BootCoordinator();
  void CrashCoordinator();
  void Decide(const Event& event);
  void CommitSome();
  void Release(std::vector<Action> actions);
  void Carry(ReplyJob& action);
  void Carry(SendToWorker& action);
  void Carry(CloseSession& action) { Break(action.session); }
  void Carry(StartPlanner& action);
  void Carry(KillPlanner&) {}
  void Carry(PublishJob&) {}
  void Carry(PublishReport&) {}
  void Carry(LogNote&) {}

  void Dial(size_t worker);
  void Up(SessionId session, v1::WorkerMessage message);
  void Break(SessionId session);
  void Beat(size_t worker);
  void Tick();
  void InjectFault();
  void SubmitOrCancel();
  bool AllEnded();
  void CheckInvariants();
  void CheckSlots();
  void CheckJobs();

  std::mt19937_64 random_;
  Timing timing_;
  absl::Duration now_;
  uint64_t next_event_ = 0;
  std::map<std::pair<absl::Duration, uint64_t>, std::function<void()>> queue_;
  bool faults_ = true;
  MemoryStore store_;
  std::optional<State> state_;  // none while the coordinator is down
  int life_ = 0;                // of the coordinator
  std::deque<Pending> pending_;
  bool commit_due_ = false;
  int nonces_ = 0;
  int requests_ = 0;
  std::vector<std::unique_ptr<SimulatedWorker>> workers_;
  std::vector<absl::Duration> partitioned_until_;
  std::map<SessionId, Session> sessions_;
  SessionId next_session_ = 1;
  std::map<std::string, v1::JobState> ended_;  // what each job ended as
  Outcome outcome_;
};

}  // namespace upipe::coordinator
