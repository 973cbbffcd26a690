// The commands that talk to a coordinator. Each writes to the given streams and returns the exit
// code of the process: 0 done (or the job SUCCEEDED), 1 failed (or FAILED), 2 the request is wrong,
// 3 CANCELLED, 4 out of time.
#pragma once

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/rpc/coordinator_client.h"
#include "common/clock.h"

namespace upipe::client {

inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitWrongRequest = 2;
inline constexpr int kExitCancelled = 3;
inline constexpr int kExitTimeout = 4;

struct TerminalSize {
  size_t columns = 80;
  size_t lines = 24;
};

// What a command works with; everything borrowed.
struct Console {
  CoordinatorClient& coordinator;
  std::ostream& out;
  std::ostream& err;
  Clock& clock;
  std::function<void(absl::Duration)> pause;  // between attempts to reach the coordinator
  std::optional<size_t> terminal_width;       // present: `out` is a terminal that can be redrawn
  bool json = false;  // answers are proto messages as JSON, errors and remarks JSON lines on `err`
  // Of the terminal as it is now; null, or none: as wide as terminal_width says.
  std::function<std::optional<TerminalSize>()> terminal_size = nullptr;
};

struct SubmitOptions {
  std::string path;
  std::vector<std::string> overrides;
  std::optional<int> priority;               // over the file's
  std::optional<absl::Duration> time_limit;  // over the file's; whole seconds
  std::string request_id;                    // empty: a random one
  bool hold = false;
  bool watch = false;
};
// Checks the file here first; retries the same request id while the coordinator is away; returns
// when the job is planned or, with watch, ended. A job whose plan is refused is a failure. In JSON
// one Job, or, with watch, one WatchResponse a line.
int Submit(Console& console, const SubmitOptions& options);

struct ListOptions {
  std::vector<v1::JobState> states;  // empty: all
  std::string name;                  // what ids begin with
  std::optional<absl::Time> since;   // submitted at or after
  std::optional<absl::Time> until;   // submitted before
  std::optional<int64_t> limit;      // the newest so many
};
int List(Console& console, const ListOptions& options);
int Describe(Console& console, const std::string& job);
// Without a grace the coordinator's own.
int Cancel(Console& console, const std::string& job, std::optional<absl::Duration> grace);
int Hold(Console& console, const std::string& job);
int Release(Console& console, const std::string& job);
// The one reason why a job is not running on, and its place in the queue.
int Why(Console& console, const std::string& job);
// What the coordinator knows of a job's checkpoints, and, where the folder of its spec is reached
// from this machine, what lies there.
int Checkpoints(Console& console, const std::string& job);

struct LogsOptions {
  std::string job;
  int rank = 0;
  int64_t generation = 0;  // 0: the latest
  bool follow = false;
  std::optional<int64_t> tail;  // last lines only
};
// The bytes of the log on `out`; with follow, waits for the job to start, goes on through its
// restarts, and ends with one line on `err` that says how the job ended; with a generation, when
// that attempt's rank is gone.
int Logs(Console& console, const LogsOptions& options);

// Until the job ends or `timeout` is over.
int Wait(Console& console, const std::string& job, absl::Duration timeout);
// In JSON one WatchResponse a line.
int Watch(Console& console, const std::string& job);

}  // namespace upipe::client
