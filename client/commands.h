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

// What a command works with; everything borrowed.
struct Console {
  CoordinatorClient& coordinator;
  std::ostream& out;
  std::ostream& err;
  Clock& clock;
  std::function<void(absl::Duration)> pause;  // between attempts to reach the coordinator
  std::optional<size_t> terminal_width;       // present: `out` is a terminal that can be redrawn
  bool json = false;  // answers are proto messages as JSON, errors and remarks JSON lines on `err`
};

struct SubmitOptions {
  std::string path;
  std::vector<std::string> overrides;
  std::string request_id;  // empty: a random one
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
int Cancel(Console& console, const std::string& job);
int Nodes(Console& console);

struct LogsOptions {
  std::string job;
  int rank = 0;
  bool follow = false;
  std::optional<int64_t> tail;  // last lines only
};
// The bytes of the log on `out`; with follow, waits for the job to start, goes on until its rank is
// gone, and ends with one line on `err` that says how the job ended.
int Logs(Console& console, const LogsOptions& options);

// Until the job ends or `timeout` is over.
int Wait(Console& console, const std::string& job, absl::Duration timeout);
// In JSON one WatchResponse a line.
int Watch(Console& console, const std::string& job);

}  // namespace upipe::client
