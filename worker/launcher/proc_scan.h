// Reads of /proc: which processes carry an attempt's nonce in their environment, whose children
// they are, and what shared memory dead ones left.
#pragma once

#include <compare>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "worker/agent/rank_process.h"

namespace upipe::worker {

// UPIPE_NONCE and UPIPE_RANK in the environment of `pid`; an empty nonce when it has none or cannot
// be read.
RankKey IdentityOf(int pid);

// Live (not zombie) processes of the machine whose environment names `key`.
std::vector<int> ProcessesOf(const RankKey& key);

// Children of this process, zombies included.
std::vector<int> OwnChildren();
bool IsZombie(int pid);

// Whether `pid` can no longer go on: a zombie, on its way out, or with a SIGKILL that it has yet to
// notice.
bool IsDying(int pid);

// A process of this boot, told apart from a later one of the same pid.
struct ProcessId {
  int pid = 0;
  uint64_t start_ticks = 0;  // since boot, 0 = it had ended when it was looked at
  auto operator<=>(const ProcessId&) const = default;
};
ProcessId IdOf(int pid);

// Names this boot of the machine: pids and ticks of another one mean nothing.
std::string BootId();

// System V segments created by one of `creators`: removed, those that are attached too if
// `also_attached`. Segments of a pid that another process has by now are a stranger's. False when
// one of them is left.
bool RemoveSystemVSegments(const std::set<ProcessId>& creators, bool also_attached);

// Files of the shared memory file system whose names contain `nonce`: removed. False when one could
// not be.
bool RemoveSharedMemoryFiles(const std::string& nonce);

// A counter line "name value" of a file such as /proc/vmstat or memory.events; -1 when absent.
int64_t ReadCounter(const std::string& path, const std::string& name);

}  // namespace upipe::worker
