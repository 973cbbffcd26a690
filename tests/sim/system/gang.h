// The trainers of one attempt: processes that attach to their worker, meet, train step by step
// between world collectives, write checkpoints, and fail in every way that is told of. What holds
// them together, collectives and summaries, is the gang's.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/sim/system/checkpoint_root.h"
#include "tests/sim/system/world.h"
#include "upipe/v1/trainer_service.pb.h"
#include "worker/agent/rank_process.h"

namespace upipe::sim {

class Trainer;

// What a trainer needs of the machine it runs on.
class TrainerHost {
 public:
  virtual ~TrainerHost() = default;
  virtual Machine& machine() = 0;
  virtual const std::string& name() const = 0;
  virtual int boots() const = 0;  // of the daemon
  // Delivered to the daemon in order, while it lives.
  virtual void FromTrainer(uint64_t connection, v1::TrainerMessage message) = 0;
  virtual void TrainerClosed(uint64_t connection) = 0;
  // Of the position page; absent: not yet told.
  virtual std::optional<BootTime> deadline() const = 0;
  // The first process of the tree ended; nothing of the tree is left.
  virtual void TreeExited(Trainer& trainer) = 0;
  virtual void TreeGone(Trainer& trainer) = 0;
};

struct Gang {
  std::string job_id;
  v1::JobSpec spec;
  int64_t generation = 0;
  std::string nonce;
  std::vector<Trainer*> members;                             // [ranks], null until launched
  JobFolder* folder = nullptr;                               // null: no checkpoints
  std::map<std::string, int64_t>* newest_running = nullptr;  // by job: passed the first barrier

  // What is wrong with it from the start.
  int deaf_rank = -1;  // never gets ready
  int wrong_hash_rank = -1;
  int short_rank = -1;         // its libraries take more than the plan counted
  bool stuck = false;          // the communicator stands still
  bool forgets_final = false;  // exits 0 although the last manifest failed
  absl::Duration step_time;

  // The collective that is under way.
  int64_t collective = 0;  // passed
  std::set<int> arrived;
  bool vote = false;
  bool retry_due = false;

  int ranks() const { return spec.parallel().ranks(); }
  int64_t steps() const { return spec.train().steps(); }
  bool Has(const std::string& worker) const;
};

class Trainer {
 public:
  enum class Phase { kStarting, kRestoring, kReady, kMeeting, kTraining, kLeaving, kEnded, kGone };

  Trainer(World& world, TrainerHost& host, Gang& gang, worker::RankKey key, int slot, int pid,
          uint64_t connection);

  void Begin();
  void Take(const v1::WorkerCommand& command);
  void StreamClosed() { Exit(3); }
  // SIGKILL to the tree. Not at once while it is in the kernel.
  void Kill();
  // Faults.
  void Stop(absl::Duration how_long);  // SIGSTOP; Kill works
  void Linger(absl::Duration how_long) { survives_kill_until_ = world_.now() + how_long; }
  void LeaveStrays(absl::Duration how_long) { strays_ = how_long; }
  void Die(int signal, const std::string& oom_evidence = "");
  void Exit(int code);
  void Vanish();  // its machine is off
  void ProposeAgain();

  // A collective of all ranks is over.
  void Released(bool vote);
  void NotePeerFailure();
  void CommitIfWhole(int64_t step);

  Phase phase() const { return phase_; }
  bool running() const { return phase_ < Phase::kEnded; }
  bool alive() const { return phase_ != Phase::kGone; }  // something of its tree
  // The daemon that was told of its end is another one by now, or none.
  bool outlived_daemon() const { return boot_ != host_.boots(); }
  // It may pass a boundary yet: neither is a kill on its way nor has its worker's deadline passed,
  // which is the first thing it looks at when its machine wakes up.
  bool can_run() const;
  bool finished() const { return exit_.exit_code == 0 && left_well_; }
  const worker::RankKey& key() const { return key_; }
  int slot() const { return slot_; }
  int pid() const { return pid_; }
  uint64_t connection() const { return connection_; }
  const worker::ProcessExit& exit() const { return exit_; }
  Gang& gang() { return gang_; }
  TrainerHost& host() { return host_; }
  Actor& actor() { return actor_; }
  v1::RankPosition Position() const;

 private:
  void Send(v1::TrainerMessage message);
  void Restore();
  void GetReady();
  void SendReady();
  void Meet(const v1::Peers& peers);
  bool IsPastDeadline() const;
  bool LeftByDeadline();
  void WatchDeadline();
  void Arrive(bool vote);
  void TryCollective();
  void CheckNewest();
  void FirstBarrier();
  void Boundary();
  void TakeStep();
  void AtBoundary(bool vote);
  void Write(int64_t step);
  void WriteSummary(int64_t step);
  void WriterDone(int64_t step, const std::string& problem);
  void Leave(absl::StatusCode code, const std::string& why, bool peer_failure = false);
  void FallShort();
  void LeaveWhenWritten(absl::StatusCode code);
  void End();
  void Moved(const char* pass);

  World& world_;
  TrainerHost& host_;
  Gang& gang_;
  const worker::RankKey key_;
  const int slot_;
  const int pid_;
  const uint64_t connection_;
  const int boot_;
  Actor actor_;
  Phase phase_ = Phase::kStarting;
  worker::ProcessExit exit_;
  Time survives_kill_until_;
  absl::Duration strays_;
  bool kill_due_ = false;
  bool left_well_ = false;  // and said so

  bool stop_requested_ = false;
  bool met_ = false;
  bool restored_ = false;
  bool ran_ = false;
  std::optional<StepKey> resume_;
  int64_t step_ = 0;          // completed
  int64_t written_step_ = 0;  // of the latest checkpoint begun
  int64_t next_write_ = 0;    // waits for the one being written
  bool writing_ = false;
  bool write_failed_ = false;
  std::optional<absl::StatusCode> leave_code_;  // once the writer is done

  uint64_t changes_ = 1;
  const char* pass_ = "starting";
  bool in_collective_ = false;
  int64_t collective_ = 0;
};

}  // namespace upipe::sim
