// The worker's memory across its own death: which ranks it may have forked. Appended and fsynced
// before a fork. A new worker kills everything in it before it says hello; an end that could not be
// recorded costs it one look for processes that are gone.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/agent/rank_process.h"
#include "worker/launcher/proc_scan.h"

namespace upipe::worker {

struct JournalEntry {
  RankKey key;
  std::string job;
  int64_t generation = 0;
  std::string cgroup;  // empty: held by environment scan
  ProcessId process;   // pid 0: not known to have been forked
  std::string boot;    // the boot of the machine that `process` belongs to
};

// A line the disk does not take is cut off again, and the next append may succeed. After a failed
// fsync every later append fails: what the disk holds is unknown. One thread.
class Journal {
 public:
  // Locks `state_dir` against a second worker (FailedPrecondition), reads what is there and leaves
  // it in place. A torn last line is dropped; any other unreadable line is DataLoss.
  static absl::StatusOr<Journal> Open(const std::string& state_dir);
  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&&) = delete;
  ~Journal();

  // Ranks not recorded gone; newest generation per job.
  const std::vector<JournalEntry>& entries() const { return entries_; }
  const std::map<std::string, int64_t>& generations() const { return generations_; }

  // Forgets all entries: their processes are proven gone. Keeps generations.
  absl::Status Compact();
  absl::Status AppendStart(const JournalEntry& entry);
  // With the boot id. Not fsynced: a lost machine has no processes.
  absl::Status AppendPid(const RankKey& key, const ProcessId& process);
  absl::Status AppendFence(const std::string& job, int64_t generation);
  absl::Status AppendGone(const RankKey& key);

 private:
  Journal(std::string path, int lock_fd) : path_(std::move(path)), lock_fd_(lock_fd) {}
  absl::Status Replay();
  absl::Status ApplyLine(const std::string& line);
  absl::Status Append(const std::string& line, bool sync);

  std::string path_;
  int lock_fd_ = -1;
  int fd_ = -1;
  int64_t whole_bytes_ = 0;  // length of the complete lines
  bool failed_ = false;
  std::vector<JournalEntry> entries_;
  std::map<std::string, int64_t> generations_;
};

}  // namespace upipe::worker
