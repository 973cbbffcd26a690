#include "common/machine.h"

#include <limits.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "common/check.h"

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

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  UPIPE_CHECK(gethostname(name, sizeof(name) - 1) == 0);
  return name;
}

}  // namespace upipe
