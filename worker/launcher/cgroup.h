// cgroup2 as the container of process trees: membership and cgroup.kill need no controller. Found
// through mountinfo, wherever it is mounted; also where this process lives in the hierarchies.
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

// Where this process lives in the unified hierarchy; all empty when none is mounted.
struct Cgroup2Place {
  std::string mount;
  std::string folder;
};
Cgroup2Place OwnCgroup2();

// memory.oom_control of the v1 memory cgroup this process lives in; "" when there is none.
std::string V1OomControl();

}  // namespace upipe::worker
