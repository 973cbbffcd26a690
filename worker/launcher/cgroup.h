// cgroup2 as the container of process trees: membership and cgroup.kill need no controller. Found
// through mountinfo, wherever it is mounted; also the memory counters that tell an OOM kill.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace upipe::worker {

// The folder of the unified hierarchy this process lives in, when children of it can be made,
// killed and removed.
std::optional<std::string> FindWritableCgroup2();

// One cgroup below it. Paths outlive the worker: a new one kills by path.
absl::Status MakeCgroup(const std::string& path);
void KillCgroup(const std::string& path);
std::vector<int> CgroupProcesses(const std::string& path);
// True when no process is left and the folder is removed (or was never there).
bool RemoveEmptyCgroup(const std::string& path);

// OOM kills counted so far; -1 = this counter cannot be read.
struct OomCounters {
  int64_t memory_events = -1;  // of the rank's own cgroup2
  int64_t v1_control = -1;     // of the worker's v1 memory cgroup
  int64_t machine = -1;        // /proc/vmstat
};
OomCounters ReadOomCounters(const std::string& cgroup);

// The best evidence that a process was killed for memory between two readings, "" when there is
// none.
std::string OomEvidence(const OomCounters& before, const OomCounters& after);

}  // namespace upipe::worker
