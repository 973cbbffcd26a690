#include "tools/gpu_check/run_parts.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <exception>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/check.h"

namespace upipe::gpu_check {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(10);
// Less is not worth a process that opens a GPU.
constexpr absl::Duration kLeastWorthwhile = absl::Seconds(2);

// No GPU, no backend, or not the memory the part needs.
bool CannotRunHere(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsResourceExhausted(status);
}

[[noreturn]] void RunAsChild(const Part& part, int findings_fd, int log_fd) {
  dup2(log_fd, STDOUT_FILENO);
  dup2(log_fd, STDERR_FILENO);
  Findings findings(findings_fd);
  absl::Status status;
  try {
    status = part.run(findings);
  } catch (const std::exception& error) {
    status = absl::InternalError(error.what());
  }
  if (CannotRunHere(status)) {
    findings.Skipped(std::string(status.message()));
  } else if (!status.ok()) {
    findings.Failed(std::string(status.message()));
  }
  _exit(0);
}

// The status of the ended child; nothing when it had to be killed at `deadline`.
std::optional<int> WaitUntil(pid_t child, absl::Time deadline) {
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    if (absl::Now() < deadline) {
      absl::SleepFor(kPoll);
      continue;
    }
    kill(child, SIGKILL);
    waitpid(child, &status, 0);
    return std::nullopt;
  }
  return status;
}

std::string ReadAll(int fd) {
  std::string text(static_cast<size_t>(std::max<off_t>(lseek(fd, 0, SEEK_END), 0)), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count =
        pread(fd, text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  text.resize(done);
  return text;
}

}  // namespace

const char* NameOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kPassed:
      return "passed";
    case Outcome::kFailed:
      return "FAILED";
    case Outcome::kStopped:
      return "STOPPED";
    case Outcome::kSkipped:
      return "skipped";
  }
  return "";
}

PartResult RunPart(const Part& part, absl::Duration limit, int log_fd) {
  PartResult result = {.name = part.name, .what = part.what, .limit = limit};
  const int fd = memfd_create("findings", MFD_CLOEXEC);
  UPIPE_CHECK(fd >= 0) << "no file for findings: " << std::strerror(errno);
  const absl::Time begin = absl::Now();
  const pid_t child = fork();
  UPIPE_CHECK(child >= 0) << "no process for a part: " << std::strerror(errno);
  if (child == 0) RunAsChild(part, fd, log_fd);
  const std::optional<int> status = WaitUntil(child, begin + limit);
  result.taken = absl::Now() - begin;
  result.found = ReadFindings(ReadAll(fd));
  close(fd);
  FindingsRead& found = result.found;
  if (!status) {
    found.failures.push_back(
        absl::StrCat("stopped after ", absl::FormatDuration(limit), ": what follows was not run"));
  } else if (WIFSIGNALED(*status)) {
    found.failures.push_back(absl::StrCat("the process died of signal ", WTERMSIG(*status), " (",
                                          strsignal(WTERMSIG(*status)),
                                          "); its last words are in the log"));
  } else if (WEXITSTATUS(*status) != 0) {
    found.failures.push_back(absl::StrCat("the process ended with ", WEXITSTATUS(*status),
                                          "; its last words are in the log"));
  }
  if (!status) {
    result.outcome = found.failures.size() > 1 ? Outcome::kFailed : Outcome::kStopped;
  } else if (!found.failures.empty()) {
    result.outcome = Outcome::kFailed;
  } else if (!found.skipped.empty() && found.passed == 0 && found.numbers.empty()) {
    result.outcome = Outcome::kSkipped;
  }
  return result;
}

std::vector<PartResult> RunParts(const std::vector<Part>& parts, absl::Duration limit, int log_fd,
                                 const std::function<void(const PartResult&)>& done) {
  const absl::Time deadline = absl::Now() + limit;
  absl::Duration of_later;
  for (const Part& part : parts) of_later += part.budget;
  std::vector<PartResult> results;
  for (const Part& part : parts) {
    const absl::Duration left = deadline - absl::Now();
    of_later -= part.budget;
    if (left < std::min(part.budget, kLeastWorthwhile)) {
      results.push_back({.name = part.name,
                         .what = part.what,
                         .limit = absl::ZeroDuration(),
                         .taken = absl::ZeroDuration(),
                         .outcome = Outcome::kSkipped,
                         .found = {}});
      results.back().found.skipped.push_back("no time was left for it");
    } else {
      results.push_back(
          RunPart(part, std::max(std::min(part.budget, left), left - of_later), log_fd));
    }
    done(results.back());
  }
  return results;
}

}  // namespace upipe::gpu_check
