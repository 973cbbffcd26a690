#include "worker/launcher/oom_evidence.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/utf8.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"

namespace upipe::worker {
namespace {

constexpr size_t kRecordBytes = 8192;  // /dev/kmsg gives one record a read, and refuses less room
constexpr size_t kReadBytesMax = 4 << 20;
constexpr size_t kLineBytes = 300;

// memory.events counts a cgroup's descendants too, and is missing where the controller is off.
int64_t NearestMemoryEvents(std::string folder, const std::string& top) {
  while (!folder.empty() && folder.size() >= top.size()) {
    if (const int64_t kills = ReadCounter(folder + "/memory.events", "oom_kill"); kills >= 0)
      return kills;
    folder.resize(folder.rfind('/'));
  }
  return -1;
}

// The kernel writes one such line for each process it kills.
bool IsOomKill(absl::string_view line) {
  return absl::StrContains(line, "Killed process ") &&
         absl::StrContains(absl::AsciiStrToLower(line), "out of memory");
}

}  // namespace

OomCounters ReadOomCounters(const std::string& cgroup) {
  OomCounters counters;
  if (const Cgroup2Place place = OwnCgroup2(); !place.mount.empty()) {
    counters.memory_events =
        NearestMemoryEvents(cgroup.empty() ? place.folder : cgroup, place.mount);
  }
  counters.v1_control = ReadCounter(V1OomControl(), "oom_kill");
  counters.machine = ReadCounter("/proc/vmstat", "oom_kill");
  return counters;
}

KernelLog::KernelLog(const std::string& path)
    : fd_(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC)) {
  if (fd_ >= 0 && lseek(fd_, 0, SEEK_END) < 0) close(std::exchange(fd_, -1));
}

KernelLog::KernelLog(KernelLog&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

KernelLog& KernelLog::operator=(KernelLog&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

KernelLog::~KernelLog() {
  if (fd_ >= 0) close(fd_);
}

OomKills KernelLog::ReadOomKills(int pid, absl::string_view name) {
  std::string text;
  char record[kRecordBytes];
  while (fd_ >= 0 && text.size() < kReadBytesMax) {
    const ssize_t got = read(fd_, record, sizeof record);
    if (got < 0 && (errno == EINTR || errno == EPIPE)) continue;  // EPIPE: records were overwritten
    if (got <= 0) break;
    text.append(record, static_cast<size_t>(got));
  }
  OomKills kills;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!kills.ours && IsOomKillOf(line, pid)) {
      const size_t words = line.find(';');  // of /dev/kmsg: "priority,sequence,time,flags;words"
      kills.ours = ToUtf8(words == line.npos ? line : line.substr(words + 1), kLineBytes);
    } else if (IsOomKill(line)) {
      kills.others += !absl::StrContains(line, absl::StrCat("(", name.substr(0, 15), ")"));
    }
  }
  return kills;
}

bool IsOomKillOf(absl::string_view line, int pid) {
  if (!absl::StrContains(absl::AsciiStrToLower(line), "out of memory")) return false;
  for (const absl::string_view words : {"Killed process ", "Kill process "}) {
    const size_t begin = line.find(words);
    if (begin == line.npos) continue;
    absl::string_view number = line.substr(begin + words.size());
    number = number.substr(0, number.find_first_not_of("0123456789"));
    int named = 0;
    if (absl::SimpleAtoi(number, &named) && named == pid) return true;
  }
  return false;
}

std::string OomEvidence(const OomCounters& before, const OomCounters& after, const OomKills& log) {
  const auto grew = [](int64_t from, int64_t to) { return from >= 0 && to > from; };
  if (grew(before.memory_events, after.memory_events)) {
    return absl::StrCat("memory.events oom_kill +", after.memory_events - before.memory_events);
  }
  if (grew(before.v1_control, after.v1_control)) {
    return absl::StrCat("memory.oom_control oom_kill +", after.v1_control - before.v1_control);
  }
  if (log.ours.has_value()) return absl::StrCat("kernel log: ", *log.ours);
  if (before.machine >= 0 && after.machine - before.machine > log.others) {
    return absl::StrCat("/proc/vmstat oom_kill +", after.machine - before.machine - log.others,
                        ", anywhere on this machine");
  }
  return "";
}

}  // namespace upipe::worker
