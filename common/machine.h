// What this machine has to offer.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace upipe {

// MemAvailable of /proc/meminfo. Unavailable when it cannot be read.
absl::StatusOr<int64_t> AvailableMemoryBytes();

// MemTotal of /proc/meminfo; the same error.
absl::StatusOr<int64_t> TotalMemoryBytes();

// Bytes of this process that are in memory. Unavailable when /proc/self/statm cannot be read.
absl::StatusOr<int64_t> ResidentMemoryBytes();

// The processor's model as /proc/cpuinfo names it, or "unknown".
std::string CpuModel();

// The machine's own name for itself.
std::string HostName();

}  // namespace upipe
