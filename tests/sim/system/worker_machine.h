// A machine with a worker: the real agent core in a daemon that may stop, crash and come back, the
// launcher and its journal, and the trainers' process trees.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/system/gang.h"
#include "tests/sim/system/world.h"
#include "worker/agent/agent.h"

namespace upipe::sim {

// What a worker needs of the rest of the world.
class WorkerUplink {
 public:
  virtual ~WorkerUplink() = default;
  virtual void Dial(size_t worker, uint64_t session) = 0;
  virtual void Hangup(size_t worker, uint64_t session) = 0;
  virtual void Up(size_t worker, uint64_t session, v1::WorkerMessage message) = 0;
  virtual Gang& GangOf(const v1::StartRank& start) = 0;
  // A process of a rank was forked.
  virtual void Launched(size_t worker, const Trainer& trainer) = 0;
  virtual void Stepped(size_t worker) = 0;
};

class WorkerMachine : public TrainerHost {
 public:
  WorkerMachine(World& world, WorkerUplink& uplink, size_t index, int num_slots);

  // The daemon; all trees of its journal are gone before it says hello.
  void Boot();
  bool has_all_slots() const { return num_slots_ == slots_max_; }
  void CrashDaemon();  // kill -9: the trainers follow
  void PowerOff();     // nothing lives on; the journal does
  void Leave() { Handle(worker::Leave{}); }
  void Deliver(uint64_t session, const v1::CoordinatorMessage& message);
  void SessionEnded(uint64_t session, const std::string& reason);

  bool up() const { return state_.has_value(); }
  bool powered() const { return powered_; }
  bool leaving() const { return state_ && (state_->left_at || state_->shutdown_until); }
  Actor& daemon() { return daemon_; }
  const worker::State& state() const { return *state_; }
  int num_slots() const { return num_slots_; }
  size_t index() const { return index_; }
  const std::map<worker::RankKey, std::unique_ptr<Trainer>>& trees() const { return trees_; }
  // Something lives in the slot.
  const Trainer* LiveIn(int slot) const;
  const Trainer* Find(const std::string& nonce, int rank) const;
  std::vector<Trainer*> Running() const;

  Machine& machine() override { return machine_; }
  const std::string& name() const override { return name_; }
  int boots() const override { return boots_; }
  void FromTrainer(uint64_t connection, v1::TrainerMessage message) override;
  void TrainerClosed(uint64_t connection) override;
  std::optional<BootTime> deadline() const override { return deadline_; }
  void TreeExited(Trainer& trainer) override;
  void TreeGone(Trainer& trainer) override;

 private:
  void StartDaemon();
  void Handle(const worker::Event& event);
  void StepAndCarry(const worker::Event& event);
  void ReadPositions();
  void Wake();
  std::vector<v1::RankPosition> PositionsOf(const std::string& nonce) const;

  void Do(const worker::OpenSession& action) { uplink_.Dial(index_, action.session); }
  void Do(const worker::CloseSession&) { uplink_.Hangup(index_, state_->session); }
  void Do(const worker::SendToCoordinator& action) {
    uplink_.Up(index_, state_->session, action.message);
  }
  void Do(const worker::LaunchRank& action);
  void Do(const worker::KillRank& action);
  void Do(const worker::SendToTrainer& action);
  void Do(const worker::CloseTrainer& action);
  void Do(const worker::ReleaseRank& action);
  void Do(const worker::NodeEvent& action) {
    if (world_.verbose()) world_.Trace(name_, action.text);
  }
  void Do(const worker::ShutdownComplete&) { ending_ = true; }
  void Do(const worker::ReadTrainer&) {}
  void Do(const worker::RecordStep&) {}
  void Do(const worker::RecordTimeline&) {}
  void Do(const worker::RecordCheckpoint&) {}
  void Do(const worker::RecordProblem&) {}
  void Do(const worker::RecordExit&) {}
  void Do(const worker::UploadLog&) {}
  void Fork(const worker::LaunchRank& action);
  Trainer* OfConnection(uint64_t connection) const;

  World& world_;
  WorkerUplink& uplink_;
  const size_t index_;
  const std::string name_;
  const int slots_max_;
  int num_slots_;
  Machine machine_;
  Actor daemon_;
  bool powered_ = true;
  bool booting_ = false;
  bool ending_ = false;
  int boots_ = 0;
  int next_pid_ = 100;
  std::optional<worker::State> state_;
  std::optional<BootTime> deadline_;  // in the position pages
  std::optional<Time> wake_at_;
  // The journal, on disk.
  std::map<std::string, int64_t> generations_;
  std::map<worker::RankKey, bool> launches_;  // asked for, not forked; whether killed meanwhile
  std::map<worker::RankKey, std::unique_ptr<Trainer>> trees_;  // not proven gone
  std::vector<std::unique_ptr<Trainer>> buried_;
};

}  // namespace upipe::sim
