// The one fork of the worker: everything between fork and exec, async-signal-safe, in one place.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace upipe::worker {

struct ChildSetup {
  std::string binary;
  std::vector<std::string> environment;  // complete
  int position_fd = -1;                  // becomes descriptor kPositionFd of the child
  int output_fd = -1;                    // its standard output and error
  std::string cgroup;                    // joined before exec; empty = none
};
inline constexpr int kPositionFd = 3;

struct Child {
  int pid = 0;
  int pidfd = -1;  // close-on-exec, the caller's
};

// Forks and execs: a session of its own, SIGKILLed when the calling *thread* ends, no descriptor
// but 0-3, default signals, oom_score_adj +900. Returns after exec succeeded, or did not within a
// second: one that fails later ends with code 127. On an error no process is left.
absl::StatusOr<Child> StartChild(const ChildSetup& setup);

}  // namespace upipe::worker
