#include "common/machine.h"

#include <fstream>
#include <string>

namespace upipe {

absl::StatusOr<int64_t> AvailableMemoryBytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == "MemAvailable:") return kib * 1024;
  }
  return absl::UnavailableError("/proc/meminfo has no MemAvailable line");
}

}  // namespace upipe
