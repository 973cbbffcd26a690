// The coordinator's core and the workers' cores on one simulated clock, network and disk. What goes
// wrong is ordered by Faults, what people want by Clients; Observer looks at every step.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/step.h"
#include "tests/sim/system/disk.h"
#include "tests/sim/system/worker_machine.h"
#include "tests/sim/system/world.h"

namespace upipe::sim {

class Observer;
class Clients;
class Faults;

using coordinator::CallId;
using coordinator::SessionId;

struct Options {
  uint64_t seed = 1;
  std::optional<coordinator::Guard> broken;
  bool verbose = false;
};

struct Outcome {
  std::vector<std::string> violations;  // the first few, with the time
  int64_t steps = 0;                    // of the cores
  int64_t faults = 0;
  std::array<int64_t, coordinator::kNumRows> fired = {};
  uint64_t digest = 0;
};

class Cluster : public WorkerUplink {
 public:
  static constexpr int64_t kJobsKept = 12;  // ended ones

  explicit Cluster(const Options& options);
  ~Cluster() override;

  // Faults for a while, then none until every job has ended and every slot is free.
  Outcome Run();

  World& world() { return world_; }
  std::vector<std::unique_ptr<WorkerMachine>>& workers() { return workers_; }
  const std::vector<std::unique_ptr<WorkerMachine>>& workers() const { return workers_; }
  const WorkerMachine* FindWorker(const std::string& name) const;
  CheckpointRoot& root() { return root_; }
  std::map<std::string, std::unique_ptr<Gang>>& gangs() { return gangs_; }
  Disk& disk() { return disk_; }
  Observer& observer() { return *observer_; }

  // --- the coordinator ---
  bool up() const { return state_.has_value(); }
  const coordinator::State& state() const { return *state_; }
  Machine& coordinator_machine() { return machine_; }
  coordinator::Moment Now() const;
  bool AllDurable() const { return pending_.empty(); }
  // Of what was handed to the disk and not yet reported durable, any prefix is.
  void CrashCoordinator(absl::Duration down_for);
  void SlowDisk(absl::Duration how_long) { slow_until_ = world_.now() + how_long; }
  void TakeBackup() { backup_ = disk_; }
  bool has_backup() const { return backup_.has_value(); }
  // The coordinator goes on with the backup's store.
  void RestoreBackup();

  // A client's call: the event arrives after a while or is lost, and so does the answer.
  using Reply = std::function<void(const absl::StatusOr<std::shared_ptr<const v1::Job>>&)>;
  void Call(std::function<coordinator::Event(CallId)> event, Reply reply = nullptr);

  // --- the network ---
  // Both ends notice in their own time; what is under way is lost.
  void Cut(size_t worker);
  // Messages of a direction wait.
  void Block(size_t worker, bool up, bool down, absl::Duration how_long);
  // A stream that loses a message is broken: what follows is lost as well.
  void LoseSome(absl::Duration how_long) { lossy_until_ = world_.now() + how_long; }

  void Dial(size_t worker, uint64_t session) override;
  void Hangup(size_t worker, uint64_t session) override;
  void Up(size_t worker, uint64_t session, v1::WorkerMessage message) override;
  Gang& GangOf(const v1::StartRank& start) override;
  void Launched(size_t worker, const Trainer& trainer) override;
  void Stepped(size_t worker) override;

 private:
  struct Link {
    SessionId id = 0;
    size_t worker = 0;
    uint64_t session = 0;  // the worker's number
    bool dead = false;     // nothing passes any more
    Time last_up, last_down;
  };
  struct Pending {
    std::vector<coordinator::Batch> batches;
    std::vector<coordinator::Action> actions;
  };

  void BootCoordinator();
  void Tick();
  void Decide(const coordinator::Event& event);
  void ScheduleCommit();
  void CommitSome();
  void Release(std::vector<coordinator::Action> actions);
  void Do(coordinator::ReplyJob& action);
  void Do(coordinator::ReplyNode&) {}
  void Do(coordinator::SendToWorker& action);
  void Do(coordinator::CloseSession& action);
  void Do(coordinator::StartPlanner& action);
  void Do(coordinator::KillPlanner&) {}
  void Do(coordinator::PublishJob& action);
  void Do(coordinator::PublishReport&) {}
  void Do(coordinator::LogNote& action);
  v1::PlanResult PlanOf(const v1::JobSpec& spec) const;

  absl::Duration Delay() { return world_.Millis(1, world_.Chance(3) ? 300 : 12); }
  Link* LinkOf(size_t worker, uint64_t session);
  Time ArrivalUp(const Link& link);
  void Arrive(SessionId id, v1::WorkerMessage& message);
  void Repeat(SessionId id, const v1::WorkerMessage& message);
  void TellWorkerClosed(const Link& link, absl::Duration delay, const std::string& why);
  void TellCoordinatorClosed(const Link& link, absl::Duration delay);
  bool IsLost();
  void EndFaults();
  bool AllEnded() const;
  void DescribeUnended();

  World world_;
  const std::optional<coordinator::Guard> broken_;
  coordinator::Timing timing_;
  Machine machine_;
  Actor actor_;
  Disk disk_;
  std::optional<Disk> backup_;
  int restores_ = 0;
  std::optional<coordinator::State> state_;
  std::deque<Pending> pending_;
  bool commit_due_ = false;
  Time slow_until_;
  int nonces_ = 0;
  bool booting_ = false;

  std::vector<std::unique_ptr<WorkerMachine>> workers_;
  std::map<std::string, std::unique_ptr<Gang>> gangs_;  // by nonce
  std::map<std::string, int64_t> newest_running_;       // by job
  CheckpointRoot root_;

  std::map<SessionId, Link> links_;
  std::vector<SessionId> link_of_worker_;
  SessionId next_link_ = 1;
  std::set<SessionId> greeted_;
  std::vector<Time> blocked_up_, blocked_down_;  // until, by worker
  Time lossy_until_;

  std::map<CallId, Reply> calls_;
  CallId next_call_ = 1;

  Outcome outcome_;
  std::unique_ptr<Observer> observer_;
  std::unique_ptr<Clients> clients_;
  std::unique_ptr<Faults> faults_;
};

}  // namespace upipe::sim
