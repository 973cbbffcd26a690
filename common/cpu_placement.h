// Which CPUs a rank's threads run on: each rank its own, hyperthread siblings only when the cores
// are used up, one NUMA node where possible. Ranks of one machine agree without talking to each
// other: a process holds a lock on the machine's own folder of each CPU it uses for as long as it
// lives, whatever its job, worker or user. Containers with network namespaces of their own have
// folders of their own: give them disjoint CPU sets, or their workers --no-cpu-placement.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace upipe {

inline constexpr char kCpuFolder[] = "/sys/devices/system/cpu";

struct Cpu {
  int id = 0;
  int core = 0;  // hyperthread siblings have equal cores
  int node = 0;  // NUMA
  friend bool operator==(const Cpu& a, const Cpu& b) = default;
};

// "0-3,8" as the kernel writes lists, ascending. ParseCpuList: InvalidArgument for anything else.
std::string FormatCpuList(const std::vector<int>& cpus);
absl::StatusOr<std::vector<int>> ParseCpuList(absl::string_view text);

// The CPUs the calling thread may run on.
absl::StatusOr<std::vector<int>> AllowedCpus();

// What `folder` says of these CPUs. Where it says nothing, each is its own core of node 0.
std::vector<Cpu> ReadCpus(const std::string& folder, const std::vector<int>& ids);

// `num` CPUs of `allowed` outside `taken`; empty when there are too few. In this order of
// preference: cores of which nothing is taken before siblings, one NUMA node before several (of
// those that suffice, the fullest), low numbers before high. Pure.
std::vector<int> ChooseCpus(const std::vector<Cpu>& allowed, const std::set<int>& taken, int num);

// CPUs that are this process's while the object lives.
class CpuClaim {
 public:
  CpuClaim() = default;
  CpuClaim(CpuClaim&& other) noexcept;
  CpuClaim& operator=(CpuClaim&& other) noexcept;
  ~CpuClaim();

  // Claims CPUs for one of the `num_ranks` ranks of a gang on this machine, with `num_threads`
  // threads each. None are given (FailedPrecondition, in words for a log) when the allowed CPUs do
  // not suffice for all of them or others hold too many: the rank then runs wherever the kernel
  // likes. Thread-safe.
  static absl::StatusOr<CpuClaim> Take(int num_ranks, int num_threads,
                                       const std::string& folder = kCpuFolder);

  std::vector<int> cpus() const;  // ascending

 private:
  absl::StatusOr<bool> Change(const std::string& folder, const std::vector<int>& chosen,
                              std::set<int>& taken);
  void Release();
  std::map<int, int> locks_;  // CPU -> file descriptor
};

// Restricts every thread of this process, and those they start later, to `cpus`.
absl::Status PlaceProcess(const std::vector<int>& cpus);
// The calling thread, and those it starts later.
absl::Status PlaceThisThread(const std::vector<int>& cpus);

}  // namespace upipe
