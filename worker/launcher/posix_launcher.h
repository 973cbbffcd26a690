// Real trainer processes. One thread forks, reaps and proves for the whole life of the worker,
// because the parent death signal follows the forking thread. At most one per process: it makes the
// process a subreaper and reaps every child the process adopts.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <variant>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/launcher/journal.h"
#include "worker/launcher/process_launcher.h"
#include "worker/launcher/rank_recorder.h"

namespace upipe::worker {

struct PosixLauncherOptions {
  std::string state_dir;     // exists; holds the journal
  std::string log_root;      // jobs without a folder in it are forgotten; empty: none is
  bool allow_cgroup = true;  // false: subreaper and environment scan although cgroup2 is there
  absl::Duration recovery_bound = absl::Seconds(10);  // for killing what the journal names
};

class PosixLauncher : public ProcessLauncher {
 public:
  // Kills everything the journal of an earlier worker names and proves it gone before it returns;
  // an error names the processes that would not die. `recorder` must outlive the launcher.
  static absl::StatusOr<std::unique_ptr<PosixLauncher>> Create(const PosixLauncherOptions& options,
                                                               RankRecorder& recorder, Sink sink);
  // Kills and reaps what still runs; events are no longer delivered.
  ~PosixLauncher() override;

  // Which state folder this is, and which start on it: 1 or more.
  const std::string& state_id() const { return state_id_; }
  int64_t start_number() const { return start_number_; }

  // Newest generation per job that this state folder has seen, from the journal.
  std::map<std::string, int64_t> generations() const { return generations_; }

  std::string containment() const override;
  void Launch(LaunchSpec spec) override;
  void Kill(const RankKey& key) override;
  void KillSuperseded(const RankKey& key, const std::string& job, int64_t generation) override;
  void SetDeadline(BootTime deadline) override;
  std::vector<v1::RankPosition> ReadPositions(const std::string& nonce) override;

 private:
  struct Tree;
  struct LaunchCommand {
    std::shared_ptr<Tree> tree;
    LaunchSpec spec;
  };
  struct FenceCommand {
    RankKey key;
    std::string job;
    int64_t generation = 0;
  };
  using Command = std::variant<LaunchCommand, FenceCommand>;

  PosixLauncher(Journal journal, RankRecorder& recorder, Sink sink,
                std::optional<std::string> cgroup_root);
  void Run();
  void RunCommands();
  void Do(LaunchCommand& command);
  void Do(FenceCommand& command);
  std::string CgroupOf(const RankKey& key) const;
  absl::Status Fork(Tree& tree, const LaunchSpec& spec);
  void Reap(Tree& tree);
  bool TryProve(Tree& tree);
  void ReapAdopted();
  std::set<int> FirstProcesses() const;
  void Emit(LaunchEvent event);
  void WriteDeadline(Tree& tree) const;
  void NotePids(Tree& tree);
  bool KillStrays(Tree& tree);
  void SendKill(Tree& tree);
  std::shared_ptr<Tree> Find(const RankKey& key) const;
  std::vector<std::shared_ptr<Tree>> Trees() const;
  void Post(Command command);

  Journal journal_;  // launcher thread
  RankRecorder& recorder_;
  const Sink sink_;
  const std::optional<std::string> cgroup_root_;
  const std::string state_id_;
  const int64_t start_number_;
  const std::map<std::string, int64_t> generations_;
  int wake_fd_ = -1;
  mutable std::mutex mutex_;  // guards the four below; never held across I/O
  std::map<RankKey, std::shared_ptr<Tree>> trees_;
  std::vector<Command> commands_;
  std::optional<BootTime> deadline_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace upipe::worker
