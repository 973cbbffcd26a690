// `upipe local up|down|status`: a coordinator and workers on this machine's loopback, in the
// background.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>

#include "absl/time/time.h"
#include "client/rpc/coordinator_client.h"

namespace upipe::client {

struct LocalConsole {
  std::string state_dir;
  std::string binary_dir;  // where upipe-coordinator and upipe-worker lie
  std::ostream& out;
  std::ostream& err;
  std::function<std::unique_ptr<CoordinatorClient>(const std::string& address)> connect;
  // After the first SIGTERM, in which jobs checkpoint and leave; after the second, in which workers
  // prove the ranks they kill gone; then comes SIGKILL.
  absl::Duration stop_limit = absl::Seconds(20);
  absl::Duration hurry_limit = absl::Seconds(15);
};

struct LocalUpOptions {
  int workers = 1;
  int ranks_per_worker = 1;
  std::optional<int64_t> memory_per_rank;  // absent: MemAvailable / all ranks
};

// Starts the daemons and waits until every worker is READY; on failure stops what it started.
// Refuses when a cluster of this state folder is up. All return exit codes as client/commands.h
// lists them.
int LocalUp(const LocalConsole& console, const LocalUpOptions& options);

// SIGTERM, a bounded wait, SIGTERM again, another, SIGKILL: workers first, then the coordinator.
// Says what did not end by itself. Never signals a process it cannot prove to be the one `up`
// started.
int LocalDown(const LocalConsole& console);

int LocalStatus(const LocalConsole& console);

// The address of the cluster in `state_dir`, when it is up.
std::optional<std::string> LocalAddress(const std::string& state_dir);

}  // namespace upipe::client
