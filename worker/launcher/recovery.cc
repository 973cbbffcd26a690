#include "worker/launcher/recovery.h"

#include <signal.h>

#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"

namespace upipe::worker {

absl::Status KillLeftovers(const JournalEntry& entry, absl::Duration bound) {
  const BootTime give_up = SystemClock().Now() + bound;
  std::set<int> pids;  // whose shared memory goes
  if (entry.pid != 0) pids.insert(entry.pid);
  for (;;) {
    std::vector<int> left = ProcessesOf(entry.key);
    if (!entry.cgroup.empty() && !RemoveEmptyCgroup(entry.cgroup)) {
      const std::vector<int> members = CgroupProcesses(entry.cgroup);
      left.insert(left.end(), members.begin(), members.end());
      KillCgroup(entry.cgroup);
    } else if (left.empty()) {
      break;
    }
    pids.insert(left.begin(), left.end());
    for (const int pid : left) kill(pid, SIGKILL);
    if (SystemClock().Now() >= give_up) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", entry.key.rank, " of ", entry.job, " generation ", entry.generation,
          " of an earlier worker would not die within ", absl::FormatDuration(bound),
          "; processes ", absl::StrJoin(left, ", "), "; end them, then start the worker again"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  RemoveSystemVSegments(pids);
  RemoveSharedMemoryFiles(entry.key.nonce);
  return absl::OkStatus();
}

}  // namespace upipe::worker
