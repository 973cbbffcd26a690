// What `upipe local up` started: one JSON file that `down`, `status` and every other command read.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/local/daemon_process.h"

namespace upipe::client {

struct LocalDaemon {
  std::string name;  // "coordinator", "worker-0", ..
  ProcessIdentity process;
  std::string log_path;
};

struct LocalCluster {
  std::string address;               // of the coordinator, host:port; empty until it serves
  std::vector<LocalDaemon> daemons;  // in starting order, coordinator first
};

std::string ClusterToJson(const LocalCluster& cluster);
absl::StatusOr<LocalCluster> ClusterFromJson(absl::string_view json);

// NotFound when there is no cluster file in `state_dir`.
absl::StatusOr<LocalCluster> ReadCluster(const std::string& state_dir);
// Atomic: a reader sees the old file or the new one.
absl::Status WriteCluster(const std::string& state_dir, const LocalCluster& cluster);
absl::Status RemoveCluster(const std::string& state_dir);

}  // namespace upipe::client
