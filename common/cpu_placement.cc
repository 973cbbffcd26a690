#include "common/cpu_placement.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace upipe {
namespace {

constexpr int kLooks = 10;
constexpr auto kPause = std::chrono::milliseconds(2);

// Free CPUs of one NUMA node, in the order they are given out.
struct NodeCpus {
  std::vector<int> own_core;  // the first of each core of which nothing is taken
  std::vector<int> shared;    // the others
};

std::map<int, NodeCpus> FreeCpus(std::vector<Cpu> allowed, const std::set<int>& taken) {
  std::sort(allowed.begin(), allowed.end(), [](const Cpu& a, const Cpu& b) { return a.id < b.id; });
  std::set<int> used_cores;
  for (const Cpu& cpu : allowed) {
    if (taken.contains(cpu.id)) used_cores.insert(cpu.core);
  }
  std::map<int, NodeCpus> nodes;
  for (const Cpu& cpu : allowed) {
    if (taken.contains(cpu.id)) continue;
    NodeCpus& node = nodes[cpu.node];
    (used_cores.insert(cpu.core).second ? node.own_core : node.shared).push_back(cpu.id);
  }
  return nodes;
}

std::vector<int> Sorted(std::vector<int> cpus) {
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

int NodeOf(const std::string& cpu_folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(cpu_folder, error)) {
    std::string name = entry.path().filename();
    int node = 0;
    if (absl::StartsWith(name, "node") && absl::SimpleAtoi(name.substr(4), &node)) return node;
  }
  return 0;
}

int CoreOf(const std::string& cpu_folder, int id) {
  std::ifstream file(cpu_folder + "/topology/thread_siblings_list");
  std::string text;
  std::getline(file, text);
  const absl::StatusOr<std::vector<int>> siblings = ParseCpuList(text);
  return siblings.ok() && !siblings->empty() ? siblings->front() : id;
}

absl::Status SetAffinity(pid_t thread, const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(cpu, &set);
  if (sched_setaffinity(thread, sizeof set, &set) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot run on cpus ", FormatCpuList(cpus)));
}

// A descriptor that holds the lock on a CPU, -1 when another process has it.
absl::StatusOr<int> LockCpu(const std::string& folder, int cpu) {
  const std::string path = absl::StrCat(folder, "/cpu", cpu);
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  if (flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
  const int error = errno;
  close(fd);
  if (error == EWOULDBLOCK) return -1;
  return absl::ErrnoToStatus(error, absl::StrCat("cannot lock ", path));
}

}  // namespace

std::string FormatCpuList(const std::vector<int>& cpus) {
  const std::vector<int> sorted = Sorted(cpus);
  std::vector<std::string> runs;
  for (size_t i = 0; i < sorted.size();) {
    size_t end = i + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    runs.push_back(end - i == 1 ? absl::StrCat(sorted[i])
                                : absl::StrCat(sorted[i], "-", sorted[end - 1]));
    i = end;
  }
  return absl::StrJoin(runs, ",");
}

absl::StatusOr<std::vector<int>> ParseCpuList(absl::string_view text) {
  std::vector<int> cpus;
  for (const absl::string_view run : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> ends =
        absl::StrSplit(run, absl::MaxSplits('-', 1));
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.first, &first) ||
        !absl::SimpleAtoi(run.find('-') == run.npos ? ends.first : ends.second, &last) ||
        first < 0 || last < first || last >= CPU_SETSIZE) {
      return absl::InvalidArgumentError(absl::StrCat("'", text, "' is no list of CPUs like 0-3,8"));
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return Sorted(std::move(cpus));
}

absl::StatusOr<std::vector<int>> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0)
    return absl::ErrnoToStatus(errno, "sched_getaffinity");
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

std::vector<Cpu> ReadCpus(const std::string& folder, const std::vector<int>& ids) {
  std::vector<Cpu> cpus;
  for (const int id : ids) {
    const std::string cpu_folder = absl::StrCat(folder, "/cpu", id);
    cpus.push_back({.id = id, .core = CoreOf(cpu_folder, id), .node = NodeOf(cpu_folder)});
  }
  return cpus;
}

std::vector<int> ChooseCpus(const std::vector<Cpu>& allowed, const std::set<int>& taken, int num) {
  const auto wanted = static_cast<size_t>(num);
  const std::map<int, NodeCpus> nodes = FreeCpus(allowed, taken);
  std::vector<int> own_core, shared;
  const NodeCpus* best_own = nullptr;
  const NodeCpus* best_any = nullptr;
  const auto free = [](const NodeCpus& node) { return node.own_core.size() + node.shared.size(); };
  for (const auto& [number, node] : nodes) {
    own_core.insert(own_core.end(), node.own_core.begin(), node.own_core.end());
    shared.insert(shared.end(), node.shared.begin(), node.shared.end());
    if (node.own_core.size() >= wanted &&
        (best_own == nullptr || node.own_core.size() < best_own->own_core.size())) {
      best_own = &node;
    }
    if (free(node) >= wanted && (best_any == nullptr || free(node) < free(*best_any))) {
      best_any = &node;
    }
  }
  if (best_own != nullptr) {
    own_core = best_own->own_core;
  } else if (own_core.size() < wanted && best_any != nullptr) {
    own_core = best_any->own_core;
    shared = best_any->shared;
  }
  own_core.insert(own_core.end(), shared.begin(), shared.end());
  if (own_core.size() < wanted) return {};
  own_core.resize(wanted);
  return Sorted(std::move(own_core));
}

CpuClaim::CpuClaim(CpuClaim&& other) noexcept : locks_(std::exchange(other.locks_, {})) {}

CpuClaim& CpuClaim::operator=(CpuClaim&& other) noexcept {
  if (this == &other) return *this;
  Release();
  locks_ = std::exchange(other.locks_, {});
  return *this;
}

CpuClaim::~CpuClaim() { Release(); }

void CpuClaim::Release() {
  for (const auto& [cpu, fd] : locks_) close(fd);
  locks_.clear();
}

// Keeps the locks on chosen CPUs, gives the others back, then locks what is missing. Never holds
// more than it wants: what others may need is not taken even for a moment. True when all are held.
absl::StatusOr<bool> CpuClaim::Change(const std::string& folder, const std::vector<int>& chosen,
                                      std::set<int>& taken) {
  for (auto lock = locks_.begin(); lock != locks_.end();) {
    if (std::find(chosen.begin(), chosen.end(), lock->first) != chosen.end()) {
      ++lock;
      continue;
    }
    close(lock->second);
    lock = locks_.erase(lock);
  }
  for (const int cpu : chosen) {
    if (locks_.contains(cpu)) continue;
    UPIPE_ASSIGN_OR_RETURN(const int fd, LockCpu(folder, cpu));
    if (fd < 0) {
      taken.insert(cpu);
      return false;
    }
    locks_[cpu] = fd;
  }
  return true;
}

absl::StatusOr<CpuClaim> CpuClaim::Take(int num_ranks, int num_threads, const std::string& folder) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<int> ids, AllowedCpus());
  if (static_cast<int64_t>(num_ranks) * num_threads > static_cast<int64_t>(ids.size())) {
    return absl::FailedPreconditionError(absl::StrCat(num_ranks, " ranks x ", num_threads,
                                                      " threads on this node and ", ids.size(),
                                                      " CPUs allowed (", FormatCpuList(ids), ")"));
  }
  const std::vector<Cpu> allowed = ReadCpus(folder, ids);
  std::set<int> taken;
  for (int look = 0; look < kLooks; ++look) {
    // Others that are choosing now may have given back what they held a moment ago.
    if (look > 0) std::this_thread::sleep_for(kPause);
    taken.clear();
    CpuClaim claim;
    while (true) {
      const std::vector<int> chosen = ChooseCpus(allowed, taken, num_threads);
      if (chosen.empty()) break;
      UPIPE_ASSIGN_OR_RETURN(const bool held, claim.Change(folder, chosen, taken));
      if (held) return claim;
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("of ", ids.size(), " CPUs allowed (", FormatCpuList(ids), ") other ranks hold ",
                   FormatCpuList({taken.begin(), taken.end()}),
                   ", too few are left for threads: ", num_threads));
}

std::vector<int> CpuClaim::cpus() const {
  std::vector<int> cpus;
  for (const auto& [cpu, fd] : locks_) cpus.push_back(cpu);
  return cpus;
}

absl::Status PlaceProcess(const std::vector<int>& cpus) {
  std::set<std::string> placed;
  // A thread not placed yet may start another: until a look finds none that is new.
  for (size_t before = 1; before != placed.size();) {
    before = placed.size();
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task", error)) {
      const std::string name = entry.path().filename();
      int thread = 0;
      if (placed.contains(name) || !absl::SimpleAtoi(name, &thread)) continue;
      const absl::Status status = SetAffinity(thread, cpus);
      if (!status.ok() && !absl::IsNotFound(status)) return status;  // ESRCH: it has ended
      placed.insert(name);
    }
    if (error) return absl::UnavailableError("cannot read /proc/self/task: " + error.message());
  }
  return absl::OkStatus();
}

absl::Status PlaceThisThread(const std::vector<int>& cpus) { return SetAffinity(0, cpus); }

}  // namespace upipe
