// The seam between what the worker decides and operating system processes. PosixLauncher forks real
// trainers, FakeLauncher plays them in memory; tests/contract/worker holds both to the same
// promises.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "common/clock.h"
#include "upipe/v1/report.pb.h"
#include "worker/agent/rank_process.h"

namespace upipe::worker {

struct LaunchSpec {
  RankKey key;
  std::string job;
  int64_t generation = 0;
  std::string binary;
  std::vector<std::string> environment;  // "NAME=value"; the launcher adds UPIPE_POSITION_FD
  std::string log_dir;                   // created when missing; receives the rank's output
};

struct TreeStarted {
  RankKey key;
  int pid = 0;
};
struct TreeLaunchFailed {
  RankKey key;
  absl::Status status;
};
// `positions`: of the attempt, read before anything else is killed because of this exit.
struct TreeExited {
  RankKey key;
  ProcessExit exit;
  std::vector<v1::RankPosition> positions;
};
struct TreeGone {
  RankKey key;
};
using LaunchEvent = std::variant<TreeStarted, TreeLaunchFailed, TreeExited, TreeGone>;

// Per key, in this order: TreeStarted, TreeExited, TreeGone, once each; or TreeLaunchFailed alone,
// which is also proof that nothing is left. TreeGone is the proof: reaped, no process of the tree
// left, its shared memory removed. When the first process exits the rest of its tree is killed
// without being asked. The sink is called from the launcher's thread and must not block. All
// methods are thread-safe; none blocks.
class ProcessLauncher {
 public:
  using Sink = std::function<void(LaunchEvent)>;
  virtual ~ProcessLauncher() = default;

  // How trees are held: "cgroup2" or "subreaper".
  virtual std::string containment() const = 0;
  // Journals durably, then forks. A key is used once.
  virtual void Launch(LaunchSpec spec) = 0;
  // SIGKILL to the whole tree, at once. Idempotent; unknown keys are ignored.
  virtual void Kill(const RankKey& key) = 0;
  // Durably records that generations of `job` below `generation` are over, then kills.
  virtual void KillSuperseded(const RankKey& key, const std::string& job, int64_t generation) = 0;
  // Until when trainers may start steps, those launched later included.
  virtual void SetDeadline(BootTime deadline) = 0;
  // Of every tree of the attempt that is not proven gone; works on stopped and dead processes.
  // `seconds_in_place` is not set.
  virtual std::vector<v1::RankPosition> ReadPositions(const std::string& nonce) = 0;
};

}  // namespace upipe::worker
