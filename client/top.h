// `upipe top`: the cluster and its jobs, or one job's ranks, looked at again and again.
#pragma once

#include <optional>
#include <string>

#include "client/commands.h"

namespace upipe::client {

struct TopOptions {
  std::string job;  // empty: the cluster
  bool once = false;
  std::optional<absl::Duration> every;  // absent: 2 seconds
};
// Redraws in place until the job ends, or for ever; prints once where `out` is no terminal. A
// coordinator that goes away is waited for, and the screen says so; one that is not there at the
// start is a failure after a while.
int Top(Console& console, const TopOptions& options);

}  // namespace upipe::client
