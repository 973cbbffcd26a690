#include "worker/launcher/cgroup.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace upipe::worker {
namespace {

struct Mount {
  std::string root;   // the cgroup that shows at `point`
  std::string point;  // empty: not mounted
};

// The hierarchy of `type` whose super options hold `option` ("" = any), from mountinfo: id parent
// dev root mountpoint options [optional fields] - type source super-options.
Mount FindMount(const std::string& type, const std::string& option) {
  std::ifstream mounts("/proc/self/mountinfo");
  std::string line;
  while (std::getline(mounts, line)) {
    const std::pair<std::string, std::string> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    const std::vector<std::string> before = absl::StrSplit(halves.first, ' ');
    const std::vector<std::string> after = absl::StrSplit(halves.second, ' ');
    if (before.size() < 5 || after.size() < 3 || after[0] != type) continue;
    const std::vector<std::string> options = absl::StrSplit(after[2], ',');
    if (option.empty() || std::find(options.begin(), options.end(), option) != options.end())
      return {before[3], before[4]};
  }
  return {};
}

// This process's path in the hierarchy of `controller` ("" = the unified one), from
// /proc/self/cgroup.
std::string OwnPath(const std::string& controller) {
  std::ifstream groups("/proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {
    const std::vector<std::string> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() == 3 && fields[1] == controller) return fields[2];
  }
  return "";
}

// Where the cgroup `path` shows below `mount`; the mount point for one outside of it.
std::string FolderOf(const Mount& mount, absl::string_view path) {
  if (mount.root != "/" && !absl::ConsumePrefix(&path, mount.root)) path = "";
  return path == "/" ? mount.point : absl::StrCat(mount.point, path);
}

bool WriteFile(const std::string& path, const std::string& text) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool written = write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  close(fd);
  return written;
}

}  // namespace

Cgroup2Place OwnCgroup2() {
  const Mount mount = FindMount("cgroup2", "");
  return {mount.point, mount.point.empty() ? "" : FolderOf(mount, OwnPath(""))};
}

std::optional<std::string> FindWritableCgroup2() {
  const std::string folder = OwnCgroup2().folder;
  if (folder.empty()) return std::nullopt;
  const std::string probe = absl::StrCat(folder, "/upipe-probe-", getpid());
  if (mkdir(probe.c_str(), 0755) != 0) return std::nullopt;
  const bool usable = access((probe + "/cgroup.procs").c_str(), W_OK) == 0 &&
                      access((folder + "/cgroup.procs").c_str(), W_OK) == 0 &&
                      access((probe + "/cgroup.kill").c_str(), W_OK) == 0;
  rmdir(probe.c_str());
  return usable ? std::optional<std::string>(folder) : std::nullopt;
}

absl::Status MakeCgroup(const std::string& path) {
  if (mkdir(path.c_str(), 0755) == 0 || errno == EEXIST) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot make cgroup ", path));
}

void KillCgroup(const std::string& path) {
  if (WriteFile(path + "/cgroup.kill", "1")) return;
  for (const int pid : CgroupProcesses(path)) kill(pid, SIGKILL);
}

std::vector<int> CgroupProcesses(const std::string& path) {
  std::vector<int> pids;
  std::ifstream file(path + "/cgroup.procs");
  for (int pid = 0; file >> pid;) pids.push_back(pid);
  return pids;
}

bool RemoveEmptyCgroup(const std::string& path) {
  return rmdir(path.c_str()) == 0 || errno == ENOENT;  // EBUSY while a process is in it
}

std::string V1OomControl() {
  const Mount mount = FindMount("cgroup", "memory");
  if (mount.point.empty()) return "";
  const std::string own = FolderOf(mount, OwnPath("memory")) + "/memory.oom_control";
  return access(own.c_str(), R_OK) == 0 ? own : mount.point + "/memory.oom_control";
}

}  // namespace upipe::worker
