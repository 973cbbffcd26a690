// Reads of /proc: which processes carry an attempt's nonce in their environment, whose children
// they are, and what shared memory dead ones left.
#pragma once

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

// System V segments created by one of `pids`: removed. False when one could not be.
bool RemoveSystemVSegments(const std::set<int>& pids);

// Files of the shared memory file system whose names contain `nonce`: removed. False when one could
// not be.
bool RemoveSharedMemoryFiles(const std::string& nonce);

// A counter line "name value" of a file such as /proc/vmstat or memory.events; -1 when absent.
int64_t ReadCounter(const std::string& path, const std::string& name);

}  // namespace upipe::worker
