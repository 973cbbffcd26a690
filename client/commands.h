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
};

struct SubmitOptions {
  std::string path;
  std::vector<std::string> overrides;
  std::string request_id;  // empty: a random one
  bool watch = false;
  bool json = false;
};
// Checks the file here first; retries the same request id while the coordinator is away; returns
// when the job is planned or, with watch, ended. A job whose plan is refused is a failure.
int Submit(Console& console, const SubmitOptions& options);

int List(Console& console, bool json);
int Describe(Console& console, const std::string& job, bool json);
int Cancel(Console& console, const std::string& job);
int Nodes(Console& console, bool json);

struct LogsOptions {
  std::string job;
  int rank = 0;
  bool follow = false;
  std::optional<int64_t> tail;  // last lines only
};
int Logs(Console& console, const LogsOptions& options);

// Until the job ends or `timeout` is over.
int Wait(Console& console, const std::string& job, absl::Duration timeout);
int Watch(Console& console, const std::string& job);

}  // namespace upipe::client
