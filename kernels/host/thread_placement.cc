#include "kernels/host/thread_placement.h"

#include <pthread.h>
#include <sched.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe::kernels {

void NameThread(std::thread& thread, const std::string& name) {
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
}

absl::Status CheckCpus(const std::vector<int>& cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
    return absl::InternalError(absl::StrCat("sched_getaffinity: ", std::strerror(errno)));
  }
  for (const int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("cpu ", cpu, " is not one of the ", CPU_COUNT(&allowed),
                     " this process may run on; name others or none"));
  }
  return absl::OkStatus();
}

void PlaceThread(std::thread& thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  const int error = pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);
  UPIPE_CHECK(error == 0) << "pthread_setaffinity_np: " << std::strerror(error);
}

}  // namespace upipe::kernels
