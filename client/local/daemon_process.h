// One background process that outlives the command that started it: started in a session of its
// own, found again later by pid and start time, so that a reused pid is never taken for it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace upipe::client {

// Which process, for good: a pid alone may be reused, a start time may repeat after a reboot.
struct ProcessIdentity {
  int pid = 0;
  int64_t start_ticks = 0;  // /proc/PID/stat, since boot
  std::string boot_id;
};

// Starts `arguments[0]` (a path) with stdin from /dev/null and both outputs appended to `log_path`.
// No descriptor of this process is inherited.
absl::StatusOr<ProcessIdentity> StartDaemon(const std::vector<std::string>& arguments,
                                            const std::string& log_path);

// A handle on the process while it lives. NotFound when it is gone, is a zombie, or the pid is
// another's now.
class LiveProcess {
 public:
  static absl::StatusOr<LiveProcess> Find(const ProcessIdentity& identity);
  LiveProcess(LiveProcess&& other) noexcept;
  LiveProcess& operator=(LiveProcess&& other) = delete;
  ~LiveProcess();

  // Sends to exactly this process; OK when it has ended meanwhile.
  absl::Status Signal(int signal) const;
  // True when it ended within `limit`.
  bool AwaitExit(absl::Duration limit) const;

 private:
  explicit LiveProcess(int pidfd) : pidfd_(pidfd) {}
  int pidfd_;
};

bool IsAlive(const ProcessIdentity& identity);

}  // namespace upipe::client
