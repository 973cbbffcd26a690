#include "client/local/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
#include <sys/pidfd.h>  // glibc 2.36 forgets to say that its functions are C
}

#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/clock.h"
#include "common/status.h"

namespace upipe::client {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string BootId() {
  return std::string(absl::StripAsciiWhitespace(ReadText("/proc/sys/kernel/random/boot_id")));
}

// When `pid` started; NotFound when there is no such process or only its zombie.
absl::StatusOr<int64_t> StartTicks(int pid) {
  const std::string stat = ReadText(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(')');  // the name may hold anything, ')' and spaces included
  if (name_end == std::string::npos) return absl::NotFoundError(absl::StrCat("no process ", pid));
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
  constexpr size_t kState = 0, kStartTime = 19;  // fields 3 and 22 of proc(5)
  int64_t ticks = 0;
  if (fields.size() <= kStartTime || !absl::SimpleAtoi(fields[kStartTime], &ticks)) {
    return absl::InternalError(absl::StrCat("cannot read the start time in /proc/", pid, "/stat"));
  }
  if (fields[kState] == "Z" || fields[kState] == "X") {
    return absl::NotFoundError(absl::StrCat("process ", pid, " has ended"));
  }
  return ticks;
}

}  // namespace

absl::StatusOr<ProcessIdentity> StartDaemon(const std::vector<std::string>& arguments,
                                            const std::string& log_path) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  UPIPE_CHECK(posix_spawn_file_actions_init(&actions) == 0);
  UPIPE_CHECK(posix_spawnattr_init(&attributes) == 0);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log_path.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  ProcessIdentity identity;
  const int error =
      posix_spawn(&identity.pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return absl::ErrnoToStatus(error,
                               absl::StrCat("cannot start ", arguments[0], " with log ", log_path));
  }
  identity.boot_id = BootId();
  absl::StatusOr<int64_t> ticks = StartTicks(identity.pid);
  if (!ticks.ok() && !absl::IsNotFound(ticks.status())) return ticks.status();
  identity.start_ticks = ticks.value_or(0);  // it has ended already: the identity matches nothing
  return identity;
}

absl::StatusOr<LiveProcess> LiveProcess::Find(const ProcessIdentity& identity) {
  if (identity.boot_id != BootId()) {
    return absl::NotFoundError(absl::StrCat("process ", identity.pid, " ran before the last boot"));
  }
  const int pidfd = pidfd_open(identity.pid, 0);
  if (pidfd < 0)
    return absl::ErrnoToStatus(errno == ESRCH ? ENOENT : errno,
                               absl::StrCat("process ", identity.pid));
  LiveProcess process(pidfd);
  // Asked after the handle is held: what the handle names cannot change any more.
  UPIPE_ASSIGN_OR_RETURN(const int64_t ticks, StartTicks(identity.pid));
  if (ticks != identity.start_ticks) {
    return absl::NotFoundError(
        absl::StrCat("pid ", identity.pid, " belongs to another process now"));
  }
  return process;
}

LiveProcess::LiveProcess(LiveProcess&& other) noexcept : pidfd_(std::exchange(other.pidfd_, -1)) {}

LiveProcess::~LiveProcess() {
  if (pidfd_ >= 0) close(pidfd_);
}

absl::Status LiveProcess::Signal(int signal) const {
  if (pidfd_send_signal(pidfd_, signal, nullptr, 0) == 0 || errno == ESRCH) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot signal the process");
}

bool LiveProcess::AwaitExit(absl::Duration limit) const {
  const BootTime end = SystemClock().Now() + limit;
  while (true) {
    const absl::Duration left = end - SystemClock().Now();
    const int64_t millis = left <= absl::ZeroDuration() ? 0 : absl::ToInt64Milliseconds(left) + 1;
    pollfd poll_fd = {.fd = pidfd_, .events = POLLIN, .revents = 0};
    const int ready = poll(&poll_fd, 1, static_cast<int>(millis));
    if (ready > 0) return true;
    if (ready == 0 && millis == 0) return false;
    UPIPE_CHECK(ready >= 0 || errno == EINTR) << "poll failed with errno " << errno;
  }
}

bool IsAlive(const ProcessIdentity& identity) { return LiveProcess::Find(identity).ok(); }

}  // namespace upipe::client
