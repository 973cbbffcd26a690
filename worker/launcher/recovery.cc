#include "worker/launcher/recovery.h"

#include <signal.h>

#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/log.h"
#include "common/status.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"

namespace upipe::worker {
namespace {

constexpr absl::Duration kDetachPatience =
    absl::Seconds(1);  // for the kernel to unmap what killed processes had attached

// Adds every process seen to `seen`.
absl::Status KillProcesses(const JournalEntry& entry, absl::Duration bound,
                           std::set<ProcessId>& seen) {
  const BootTime give_up = SystemClock().Now() + bound;
  for (;;) {
    std::vector<int> left = ProcessesOf(entry.key);
    if (!entry.cgroup.empty() && !RemoveEmptyCgroup(entry.cgroup)) {
      const std::vector<int> members = CgroupProcesses(entry.cgroup);
      left.insert(left.end(), members.begin(), members.end());
      KillCgroup(entry.cgroup);
    } else if (left.empty()) {
      return absl::OkStatus();
    }
    for (const int pid : left) {
      seen.insert(IdOf(pid));
      kill(pid, SIGKILL);
    }
    if (SystemClock().Now() >= give_up) {
      return absl::DeadlineExceededError(absl::StrCat(
          "rank ", entry.key.rank, " of ", entry.job, " generation ", entry.generation,
          " of an earlier worker would not die within ", absl::FormatDuration(bound),
          "; processes ", absl::StrJoin(left, ", "), "; end them, then start the worker again"));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

absl::Status KillLeftovers(const std::vector<JournalEntry>& entries, absl::Duration bound) {
  std::set<ProcessId> seen;  // whose shared memory goes
  const std::string boot = BootId();
  for (const JournalEntry& entry : entries) {
    UPIPE_LOG(WARNING) << "an earlier worker left rank " << entry.key.rank << " of " << entry.job
                       << " generation " << entry.generation << ": killing it";
    if (entry.process.pid != 0 && entry.boot == boot) seen.insert(entry.process);
    UPIPE_RETURN_IF_ERROR(KillProcesses(entry, bound, seen));
  }
  const BootTime give_up = SystemClock().Now() + kDetachPatience;
  while (!RemoveSystemVSegments(seen, /*also_attached=*/false)) {
    if (SystemClock().Now() >= give_up) {
      UPIPE_LOG(WARNING) << "left shared memory that is still attached, with a creator of the pid "
                            "of an earlier rank";
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  for (const JournalEntry& entry : entries) RemoveSharedMemoryFiles(entry.key.nonce);
  return absl::OkStatus();
}

}  // namespace upipe::worker
