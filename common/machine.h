// What this machine has to offer.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace upipe {

// MemAvailable of /proc/meminfo. Unavailable when it cannot be read.
absl::StatusOr<int64_t> AvailableMemoryBytes();

// The machine's own name for itself.
std::string HostName();

}  // namespace upipe
