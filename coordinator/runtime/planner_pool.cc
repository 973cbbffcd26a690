#include "coordinator/runtime/planner_pool.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
extern "C" {
#include <sys/pidfd.h>  // glibc 2.36 declares these without C linkage
}

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/check.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxWordsBytes = 4096;

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), bytes.size());
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

absl::StatusOr<v1::PlanResult> ReadResult(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  v1::PlanResult result;
  if (!file) return absl::InternalError("upipe-plan ended well but wrote no result");
  if (!result.ParseFromIstream(&file)) {
    return absl::InternalError("upipe-plan ended well but its result does not parse");
  }
  return result;
}

std::string LastLine(const std::string& words) {
  std::string last;
  for (absl::string_view line : absl::StrSplit(words, '\n', absl::SkipWhitespace())) {
    last = std::string(line);
  }
  return last;
}

// Between vfork and exec: on the parent's memory, so only calls that leave it as it is.
[[noreturn]] void ExecChild(char* const* argv, const PlannerLimits& limits, int stderr_fd,
                            pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);
  setpgid(0, 0);
  const rlim_t cpu = absl::ToInt64Seconds(limits.cpu);
  const rlimit cpu_limit{cpu, cpu + 1};
  const rlimit address_limit{static_cast<rlim_t>(limits.address_bytes),
                             static_cast<rlim_t>(limits.address_bytes)};
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CPU, &cpu_limit);
  setrlimit(RLIMIT_AS, &address_limit);
  setrlimit(RLIMIT_CORE, &no_core);
  // A handler of this process must not run in the child, which shares its memory.
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction ours {};
    if (sigaction(signal, nullptr, &ours) != 0 || ours.sa_handler == SIG_DFL) continue;
    ours = {};
    sigaction(signal, &ours, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(stderr_fd, STDERR_FILENO);
  dup2(stderr_fd, STDOUT_FILENO);
  execv(argv[0], argv);
  constexpr char kFailed[] = "cannot execute the planner\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, kFailed, sizeof(kFailed) - 1);
  _exit(127);
}

// fork would copy the page tables of a coordinator that holds tens of thousands of ranks, for every
// job it plans.
pid_t Spawn(char* const* argv, const PlannerLimits& limits, int stderr_fd) {
  const pid_t parent = getpid();
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  const pid_t pid = vfork();
  if (pid == 0) ExecChild(argv, limits, stderr_fd, parent);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return pid;
}

}  // namespace

PlannerPool::PlannerPool(Options options, std::function<void(PlanFinished)> finished)
    : options_(std::move(options)), finished_(std::move(finished)) {
  for (int i = 0; i < options_.num_threads; ++i) threads_.emplace_back([this] { Work(); });
}

PlannerPool::~PlannerPool() {
  queue_.Close();
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    for (const auto& [job, pidfd] : running_) pidfd_send_signal(pidfd, SIGKILL, nullptr, 0);
  }
  for (std::thread& thread : threads_) thread.join();
}

void PlannerPool::Start(StartPlanner job) {
  {
    std::lock_guard lock(mutex_);
    killed_.erase(job.job_id);
  }
  UPIPE_CHECK(queue_.TryPush(std::move(job)) || queue_.closed());
}

void PlannerPool::Kill(const std::string& job_id) {
  std::lock_guard lock(mutex_);
  killed_.insert(job_id);
  const auto running = running_.find(job_id);
  if (running != running_.end()) pidfd_send_signal(running->second, SIGKILL, nullptr, 0);
}

void PlannerPool::Work() {
  while (std::optional<StartPlanner> job = queue_.Pop()) {
    absl::StatusOr<v1::PlanResult> result = Plan(*job);
    {
      std::lock_guard lock(mutex_);
      killed_.erase(job->job_id);
      if (closing_) return;
    }
    finished_({job->job_id, std::move(result)});
  }
}

absl::StatusOr<v1::PlanResult> PlannerPool::Plan(const StartPlanner& job) {
  const std::string input = absl::StrCat(options_.work_dir, "/", job.job_id, ".spec");
  const std::string output = absl::StrCat(options_.work_dir, "/", job.job_id, ".plan");
  UPIPE_RETURN_IF_ERROR(WriteFile(input, job.spec.SerializeAsString()));
  std::vector<std::string> arguments = {options_.binary,
                                        "--spec",
                                        input,
                                        "--memory-per-rank",
                                        absl::StrCat(job.memory_per_rank_bytes),
                                        "--output",
                                        output};
  const std::string earlier = absl::StrCat(options_.work_dir, "/", job.job_id, ".earlier");
  if (job.earlier != nullptr) {
    UPIPE_RETURN_IF_ERROR(WriteFile(earlier, job.earlier->SerializeAsString()));
    arguments.insert(arguments.end(), {"--earlier", earlier});
  }
  const absl::Status run = RunChild(job.job_id, arguments);
  absl::StatusOr<v1::PlanResult> result = run.ok() ? ReadResult(output) : run;
  for (const std::string& file : {input, output, earlier}) unlink(file.c_str());
  return result;
}

absl::Status PlannerPool::RunChild(const std::string& job_id,
                                   const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int words[2];
  if (pipe2(words, O_CLOEXEC | O_NONBLOCK) != 0) {
    return absl::UnavailableError(absl::StrCat("pipe: ", std::strerror(errno)));
  }
  pid_t pid = -1;
  int pidfd = -1;
  {
    std::lock_guard lock(mutex_);
    if (closing_ || killed_.contains(job_id)) {
      close(words[0]);
      close(words[1]);
      return absl::CancelledError("the job was cancelled");
    }
    pid = Spawn(argv.data(), options_.limits, words[1]);
    if (pid > 0) pidfd = pidfd_open(pid, 0);
    if (pidfd >= 0) running_[job_id] = pidfd;
  }
  close(words[1]);
  if (pid < 0 || pidfd < 0) {
    const std::string error = std::strerror(errno);
    close(words[0]);
    if (pid > 0) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    return absl::UnavailableError(absl::StrCat("cannot start ", arguments[0], ": ", error));
  }
  const absl::Status status = Await(job_id, pid, pidfd, words[0]);
  close(words[0]);
  close(pidfd);
  return status;
}

absl::Status PlannerPool::Await(const std::string& job_id, int pid, int pidfd, int stderr_fd) {
  std::string words;
  const absl::Time deadline = absl::Now() + options_.limits.wall;
  bool timed_out = false;
  pollfd watched[2] = {{pidfd, POLLIN, 0}, {stderr_fd, POLLIN, 0}};
  while (true) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    const int ready = poll(watched, 2, static_cast<int>(std::max<int64_t>(left, 0)));
    if (ready == 0) {
      timed_out = true;
      break;
    }
    if (watched[1].revents != 0) {
      char buffer[1024];
      const ssize_t got = read(stderr_fd, buffer, sizeof(buffer));
      if (got > 0) words.append(buffer, got);
      if (words.size() > kMaxWordsBytes) words.erase(0, words.size() - kMaxWordsBytes);
      if (got == 0) watched[1].fd = -1;
    } else if (watched[0].revents != 0) {
      break;
    }
  }
  kill(-pid, SIGKILL);  // its group: whatever it started
  if (timed_out) kill(pid, SIGKILL);
  int status = 0;
  UPIPE_CHECK(waitpid(pid, &status, 0) == pid) << std::strerror(errno);
  {
    std::lock_guard lock(mutex_);
    running_.erase(job_id);
  }
  const std::string said = words.empty() ? "" : absl::StrCat(", said: ", LastLine(words));
  if (timed_out) {
    return absl::DeadlineExceededError(
        absl::StrCat("upipe-plan was killed after ", FormatTimeSpan(options_.limits.wall), said));
  }
  if (WIFSIGNALED(status)) {
    return absl::InternalError(absl::StrCat("upipe-plan died of signal ", WTERMSIG(status),
                                            " (limits: ", FormatTimeSpan(options_.limits.cpu),
                                            " of CPU, ", FormatBytes(options_.limits.address_bytes),
                                            ")", said));
  }
  if (WEXITSTATUS(status) != 0) {
    return absl::InternalError(
        absl::StrCat("upipe-plan exited with code ", WEXITSTATUS(status), said));
  }
  return absl::OkStatus();
}

}  // namespace upipe::coordinator
