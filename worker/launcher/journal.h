// The worker's memory across its own death: which ranks it may have forked, and how often it was
// started. Appended and fsynced before a fork. A new worker kills everything in it before it says
// hello; an end that could not be recorded costs it one look for processes that are gone.
#pragma once

#include <map>
#include <optional>
#include <set>
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
// fsync every later append fails: what the disk holds is unknown. Rewrites itself without what is
// over when it has grown to four times its size and 1 MiB. One thread.
class Journal {
 public:
  // Locks `state_dir` against a second worker (FailedPrecondition), reads what is there, leaves it
  // in place and appends this start, fsynced. A torn last line is dropped; any other unreadable
  // line is DataLoss.
  static absl::StatusOr<Journal> Open(const std::string& state_dir);
  Journal(Journal&& other) noexcept;
  Journal& operator=(Journal&&) = delete;
  ~Journal();

  // A random name that `state_dir` keeps, and how often a journal was opened in it: 1 or more.
  const std::string& state_id() const { return state_id_; }
  int64_t start_number() const { return start_number_; }

  // Ranks not recorded gone; newest generation per job.
  const std::vector<JournalEntry>& entries() const { return entries_; }
  const std::map<std::string, int64_t>& generations() const { return generations_; }

  // Rewrites it without entries: their processes are proven gone. Keeps the generations of `jobs`;
  // absent: of all.
  absl::Status Forget(const std::optional<std::set<std::string>>& jobs = std::nullopt);
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
  absl::Status Rewrite();

  std::string path_;
  int lock_fd_ = -1;
  int fd_ = -1;
  int64_t whole_bytes_ = 0;  // length of the complete lines
  int64_t rewritten_bytes_ = 0;
  bool failed_ = false;
  std::string state_id_;
  int64_t start_number_ = 0;
  std::vector<JournalEntry> entries_;
  std::map<std::string, int64_t> generations_;
};

}  // namespace upipe::worker
