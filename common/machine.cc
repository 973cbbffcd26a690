#include "common/machine.h"

#include <limits.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe {

namespace {

absl::StatusOr<int64_t> MemoryInfo(const std::string& name) {
  std::ifstream meminfo("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (meminfo >> key >> kib) {
    std::getline(meminfo, unit);
    if (key == name + ":") return kib * 1024;
  }
  return absl::UnavailableError(absl::StrCat("/proc/meminfo has no ", name, " line"));
}

}  // namespace

absl::StatusOr<int64_t> AvailableMemoryBytes() { return MemoryInfo("MemAvailable"); }

absl::StatusOr<int64_t> TotalMemoryBytes() { return MemoryInfo("MemTotal"); }

absl::StatusOr<int64_t> ResidentMemoryBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t all_pages = 0, resident_pages = 0;
  if (!(statm >> all_pages >> resident_pages)) {
    return absl::UnavailableError("/proc/self/statm cannot be read");
  }
  return resident_pages * sysconf(_SC_PAGESIZE);
}

std::string CpuModel() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(colon + 2);
    }
  }
  return "unknown";
}

std::string HostName() {
  char name[HOST_NAME_MAX + 1] = {};
  UPIPE_CHECK(gethostname(name, sizeof(name) - 1) == 0);
  return name;
}

}  // namespace upipe
