#include "common/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace upipe {

std::atomic<bool> failpoint_internal::armed{false};

namespace {

constexpr int kExitCode = 17;
constexpr absl::string_view kActions[] = {"kill", "stop", "exit", "enospc", "eio"};

struct Trap {
  std::string name;
  std::string action;
  int64_t hits_left = 1;
};

struct Armed {
  std::mutex mutex;
  std::vector<Trap> traps;
  std::string file;       // empty: none
  std::string file_text;  // as last read
  std::vector<Trap> file_traps;
};

Armed& TheArmed() {
  static auto* armed = new Armed;
  return *armed;
}

absl::StatusOr<std::vector<Trap>> Parse(absl::string_view text) {
  std::vector<Trap> traps;
  for (const absl::string_view item : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::vector<std::string> parts =
        absl::StrSplit(absl::StripAsciiWhitespace(item), absl::MaxSplits(':', 2));
    Trap trap{.name = parts[0], .action = parts.size() > 1 ? parts[1] : ""};
    if (std::find(std::begin(failpoints::kAll), std::end(failpoints::kAll), trap.name) ==
        std::end(failpoints::kAll)) {
      return absl::InvalidArgumentError(absl::StrCat("no failpoint is called '", trap.name,
                                                     "'; there are ",
                                                     absl::StrJoin(failpoints::kAll, ", ")));
    }
    if (std::find(std::begin(kActions), std::end(kActions), trap.action) == std::end(kActions)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "failpoint action '", trap.action, "' is none of ", absl::StrJoin(kActions, ", ")));
    }
    if (parts.size() > 2 && (!absl::SimpleAtoi(parts[2], &trap.hits_left) || trap.hits_left < 1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("failpoint hit '", parts[2], "' is not a number from 1"));
    }
    traps.push_back(std::move(trap));
  }
  return traps;
}

// Counts a hit; what to do at this one.
std::optional<std::string> Count(std::vector<Trap>& traps, absl::string_view name) {
  for (Trap& trap : traps) {
    if (trap.name == name && trap.hits_left > 0 && --trap.hits_left == 0) return trap.action;
  }
  return std::nullopt;
}

// The same for the file: whoever removes it acts.
std::optional<std::string> CountInFile(Armed& armed, absl::string_view name) {
  if (armed.file.empty()) return std::nullopt;
  std::ostringstream content;
  content << std::ifstream(armed.file).rdbuf();
  if (std::string text = content.str(); text != armed.file_text) {
    absl::StatusOr<std::vector<Trap>> traps = Parse(text);
    armed.file_traps = traps.ok() ? *std::move(traps) : std::vector<Trap>();
    armed.file_text = std::move(text);
  }
  std::optional<std::string> action = Count(armed.file_traps, name);
  if (action && unlink(armed.file.c_str()) != 0) action.reset();
  return action;
}

absl::Status Act(const std::string& action, absl::string_view name) {
  const std::string line = absl::StrCat("failpoint ", name, ": ", action, "\n");
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  if (action == "kill") kill(getpid(), SIGKILL);
  if (action == "stop") kill(getpid(), SIGSTOP);
  if (action == "exit") _exit(kExitCode);
  if (action == "enospc") return absl::ErrnoToStatus(ENOSPC, absl::StrCat("failpoint ", name));
  if (action == "eio") return absl::ErrnoToStatus(EIO, absl::StrCat("failpoint ", name));
  return absl::OkStatus();
}

}  // namespace

absl::Status failpoint_internal::Hit(absl::string_view name) {
  Armed& armed = TheArmed();
  std::optional<std::string> action;
  {
    const std::lock_guard lock(armed.mutex);
    action = Count(armed.traps, name);
    if (!action) action = CountInFile(armed, name);
  }
  return action ? Act(*action, name) : absl::OkStatus();
}

absl::Status ArmFailpoints(absl::string_view text) {
  UPIPE_ASSIGN_OR_RETURN(std::vector<Trap> traps, Parse(text));
  Armed& armed = TheArmed();
  const std::lock_guard lock(armed.mutex);
  armed.traps = std::move(traps);
  failpoint_internal::armed = !armed.traps.empty() || !armed.file.empty();
  return absl::OkStatus();
}

absl::Status ArmFailpoints(const char* upipe_failpoint, const char* upipe_failpoint_file) {
  {
    Armed& armed = TheArmed();
    const std::lock_guard lock(armed.mutex);
    armed.file = upipe_failpoint_file == nullptr ? "" : upipe_failpoint_file;
  }
  return ArmFailpoints(upipe_failpoint == nullptr ? "" : upipe_failpoint);
}

}  // namespace upipe
