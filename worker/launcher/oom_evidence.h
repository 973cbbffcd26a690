// Whether the kernel killed a process for want of memory: counters of its cgroup and of the machine
// read before and after, and the kernel's own log. A SIGKILL alone is no proof.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace upipe::worker {

// OOM kills counted so far; -1 = this counter cannot be read.
struct OomCounters {
  int64_t memory_events = -1;  // of the nearest cgroup2 at or above the rank's that counts
  int64_t v1_control = -1;     // of the worker's v1 memory cgroup
  int64_t machine = -1;        // /proc/vmstat
};
// `cgroup` is the rank's own folder, "" when it has none: then it lives in the worker's.
OomCounters ReadOomCounters(const std::string& cgroup);

// What the kernel's log tells about kills for want of memory.
struct OomKills {
  std::optional<std::string> ours;  // the line that names our process
  int64_t others = 0;               // of programs of another name
};

// The kernel's log from the moment of construction on. Where it cannot be read it stays empty.
class KernelLog {
 public:
  explicit KernelLog(const std::string& path = "/dev/kmsg");
  KernelLog(KernelLog&& other) noexcept;
  KernelLog& operator=(KernelLog&& other) noexcept;
  ~KernelLog();

  // Whether the kernel killed `pid`, a program that it calls `name` (its first 15 characters).
  // Another pid of that name is not counted: in a container the kernel's pids are not ours. Reads
  // on from where the last call ended.
  OomKills ReadOomKills(int pid, absl::string_view name);

 private:
  int fd_ = -1;
};

// Whether a line of the kernel's log says so: "Out of memory: Killed process 4711 (upipe-trainer)".
bool IsOomKillOf(absl::string_view line, int pid);

// The best evidence that a process was killed for memory between two readings, "" when there is
// none: its cgroup's counter, the v1 counter, the kernel's word, and kills that the machine's
// counter counts and the log does not explain by other programs.
std::string OomEvidence(const OomCounters& before, const OomCounters& after, const OomKills& log);

}  // namespace upipe::worker
