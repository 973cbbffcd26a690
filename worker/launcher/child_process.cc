#include "worker/launcher/child_process.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace upipe::worker {
namespace {

constexpr int kExecPatienceMillis = 1000;  // a disk may hang, and other ranks wait meanwhile
constexpr int kFirstFreeFd = 10;  // sources are moved above every descriptor the child receives

// What failed between fork and exec, sent over a pipe that exec closes.
struct ChildFailure {
  int error;
  char step[24];
};

[[noreturn]] void Fail(int report_fd, const char* step) {
  ChildFailure failure{errno, {}};
  strncpy(failure.step, step, sizeof failure.step - 1);
  [[maybe_unused]] const ssize_t written = write(report_fd, &failure, sizeof failure);
  _exit(127);
}

struct Prepared {
  const char* binary;
  char* const* arguments;
  char* const* environment;
  int position_fd, output_fd, null_fd, cgroup_fd, report_fd;
  pid_t parent;
};

// Raising the own score needs no right; where the file is missing the trainer runs without.
void RaiseOomScore() {
  const int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  [[maybe_unused]] const ssize_t written = write(fd, "900", 3);
  close(fd);
}

// In the child. Async-signal-safe calls only.
[[noreturn]] void BecomeTrainer(const Prepared& p) {
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) Fail(p.report_fd, "PDEATHSIG");
  if (getppid() != p.parent) _exit(127);  // the worker died between fork and prctl
  if (setsid() < 0) Fail(p.report_fd, "setsid");
  if (p.cgroup_fd >= 0 && write(p.cgroup_fd, "0", 1) != 1) Fail(p.report_fd, "joining the cgroup");
  RaiseOomScore();
  for (int signal = 1; signal < NSIG; ++signal) ::signal(signal, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (dup2(p.null_fd, 0) < 0 || dup2(p.output_fd, 1) < 0 || dup2(p.output_fd, 2) < 0 ||
      dup2(p.position_fd, kPositionFd) < 0) {
    Fail(p.report_fd, "dup2");
  }
  if (close_range(kPositionFd + 1, ~0U, CLOSE_RANGE_CLOEXEC) != 0) Fail(p.report_fd, "close_range");
  execve(p.binary, p.arguments, p.environment);
  Fail(p.report_fd, "exec");
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { Close(); }
  int get() const { return fd_; }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_;
};

int MoveUp(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, kFirstFreeFd); }

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// Waits for exec to close the pipe, or for the child's own words; not for ever.
absl::Status AwaitExec(int report_fd, const std::string& binary) {
  pollfd polled{report_fd, POLLIN, 0};
  if (poll(&polled, 1, kExecPatienceMillis) <= 0) return absl::OkStatus();
  ChildFailure failure;
  const ssize_t got = read(report_fd, &failure, sizeof failure);
  if (got != sizeof failure) return absl::OkStatus();
  return absl::ErrnoToStatus(failure.error,
                             absl::StrCat("cannot start ", binary, ", at ", failure.step));
}

}  // namespace

absl::StatusOr<Child> StartChild(const ChildSetup& setup) {
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot make a pipe");
  Descriptor report_read(report[0]);
  Descriptor report_low(report[1]);
  Descriptor report_write(MoveUp(report[1]));
  report_low.Close();
  const Descriptor null_low(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const Descriptor null_fd(MoveUp(null_low.get()));
  const Descriptor position(MoveUp(setup.position_fd));
  const Descriptor output(MoveUp(setup.output_fd));
  if (report_write.get() < 0 || null_fd.get() < 0 || position.get() < 0 || output.get() < 0) {
    return absl::ErrnoToStatus(errno, "cannot prepare the trainer's descriptors");
  }
  const Descriptor cgroup(
      setup.cgroup.empty() ? -1
                           : open((setup.cgroup + "/cgroup.procs").c_str(), O_WRONLY | O_CLOEXEC));
  if (!setup.cgroup.empty() && cgroup.get() < 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open cgroup ", setup.cgroup));
  }
  const std::vector<std::string> argument_strings = {setup.binary};
  const std::vector<char*> arguments = Pointers(argument_strings);
  const std::vector<char*> environment = Pointers(setup.environment);
  const Prepared prepared{setup.binary.c_str(), arguments.data(),   environment.data(),
                          position.get(),       output.get(),       null_fd.get(),
                          cgroup.get(),         report_write.get(), getpid()};
  const pid_t pid = fork();
  if (pid < 0) return absl::ErrnoToStatus(errno, "cannot fork");
  if (pid == 0) BecomeTrainer(prepared);
  report_write.Close();
  absl::Status status = AwaitExec(report_read.get(), setup.binary);
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (status.ok() && pidfd < 0) status = absl::ErrnoToStatus(errno, "pidfd_open");
  if (!status.ok()) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    if (pidfd >= 0) close(pidfd);
    return status;
  }
  return Child{pid, pidfd};
}

}  // namespace upipe::worker
