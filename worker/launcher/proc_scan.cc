#include "worker/launcher/proc_scan.h"

#include <sys/ipc.h>
#include <sys/shm.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace upipe::worker {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return content.str();
}

// State letter and parent of a process, from /proc/<pid>/stat; false when it is gone.
bool ReadStat(int pid, char& state, int& parent) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream rest(stat.substr(name_end + 1));
  return static_cast<bool>(rest >> state >> parent);
}

std::vector<int> AllProcesses() {
  std::vector<int> pids;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    int pid = 0;
    if (absl::SimpleAtoi(entry.path().filename().string(), &pid)) pids.push_back(pid);
  }
  return pids;
}

}  // namespace

RankKey IdentityOf(int pid) {
  RankKey key;
  const std::string environment = ReadFile(absl::StrCat("/proc/", pid, "/environ"));
  for (absl::string_view entry : absl::StrSplit(environment, '\0')) {
    if (absl::ConsumePrefix(&entry, "UPIPE_NONCE=")) {
      key.nonce = std::string(entry);
    } else if (absl::ConsumePrefix(&entry, "UPIPE_RANK=") && !absl::SimpleAtoi(entry, &key.rank)) {
      return {};
    }
  }
  return key;
}

bool IsZombie(int pid) {
  char state = 0;
  int parent = 0;
  return ReadStat(pid, state, parent) && (state == 'Z' || state == 'X');
}

bool IsDying(int pid) {
  constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return true;
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(name_end + 1), ' ');
  uint64_t flags = 0;  // fields[1] is the state, field 3 of proc(5)
  if (fields.size() > 7 && absl::SimpleAtoi(fields[7], &flags) && (flags & kExiting) != 0) {
    return true;
  }
  if (IsZombie(pid)) return true;
  for (absl::string_view line :
       absl::StrSplit(ReadFile(absl::StrCat("/proc/", pid, "/status")), '\n')) {
    uint64_t pending = 0;
    if (!absl::ConsumePrefix(&line, "SigPnd:\t") && !absl::ConsumePrefix(&line, "ShdPnd:\t")) {
      continue;
    }
    if (absl::SimpleHexAtoi(line, &pending) && (pending >> (SIGKILL - 1) & 1) != 0) return true;
  }
  return false;
}

std::vector<int> ProcessesOf(const RankKey& key) {
  std::vector<int> pids;
  for (const int pid : AllProcesses()) {
    if (IdentityOf(pid) == key && !IsZombie(pid)) pids.push_back(pid);
  }
  return pids;
}

std::vector<int> OwnChildren() {
  std::vector<int> pids;
  const int self = getpid();
  for (const int pid : AllProcesses()) {
    char state = 0;
    int parent = 0;
    if (ReadStat(pid, state, parent) && parent == self) pids.push_back(pid);
  }
  return pids;
}

ProcessId IdOf(int pid) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return {pid, 0};
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(name_end + 1), ' ');
  ProcessId id{pid, 0};  // fields[1] is the state, field 3 of proc(5); the start is field 22
  if (fields.size() > 20 && !absl::SimpleAtoi(fields[20], &id.start_ticks)) id.start_ticks = 0;
  return id;
}

std::string BootId() {
  return std::string(absl::StripAsciiWhitespace(ReadFile("/proc/sys/kernel/random/boot_id")));
}

bool RemoveSystemVSegments(const std::set<ProcessId>& creators, bool also_attached) {
  std::set<int> pids;
  for (const ProcessId& creator : creators) {
    const uint64_t now = IdOf(creator.pid).start_ticks;
    if (now == 0 || now == creator.start_ticks) pids.insert(creator.pid);
  }
  std::ifstream table("/proc/sysvipc/shm");
  std::string line;
  std::getline(table, line);  // heading: key shmid perms size cpid lpid nattch ...
  bool all_removed = true;
  while (std::getline(table, line)) {
    std::istringstream row(line);
    int64_t key = 0, id = 0, permissions = 0, size = 0, last = 0, attached = 0;
    int creator = 0;
    if (!(row >> key >> id >> permissions >> size >> creator >> last >> attached) ||
        !pids.contains(creator)) {
      continue;
    }
    if (attached > 0 && !also_attached) {
      all_removed = false;
      continue;
    }
    if (shmctl(static_cast<int>(id), IPC_RMID, nullptr) != 0 && errno != EINVAL && errno != EIDRM) {
      all_removed = false;
    }
  }
  return all_removed;
}

bool RemoveSharedMemoryFiles(const std::string& nonce) {
  bool all_removed = true;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error)) {
    if (!absl::StrContains(entry.path().filename().string(), nonce)) continue;
    std::error_code remove_error;
    std::filesystem::remove_all(entry.path(), remove_error);
    if (remove_error) all_removed = false;
  }
  return all_removed;
}

int64_t ReadCounter(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  std::string word;
  int64_t value = 0;
  while (file >> word >> value) {
    if (word == name) return value;
  }
  return -1;
}

}  // namespace upipe::worker
