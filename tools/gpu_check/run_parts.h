// Runs the parts of the check one after another, each in a process of its own with a limit on its
// time: a GPU that faults, a crash or a hang costs one part and no other.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "tools/gpu_check/findings.h"

namespace upipe::gpu_check {

struct Part {
  std::string name;
  std::string what;                // one line
  absl::Duration budget;           // it may take this much in any case
  std::vector<std::string> cases;  // what it runs, with sizes: for the dry listing
  // What it returns is a failure, or with FailedPrecondition and ResourceExhausted why it cannot
  // run on this machine.
  std::function<absl::Status(Findings&)> run;
};

enum class Outcome { kPassed, kFailed, kStopped, kSkipped };
const char* NameOf(Outcome outcome);

struct PartResult {
  std::string name;
  std::string what;
  absl::Duration limit, taken;
  Outcome outcome = Outcome::kPassed;
  FindingsRead found;  // how the process ended, where that was not well, is a failure
};

// In a child of this process, which has no threads: `part.run` and what it finds. Its output goes
// to the file `log_fd`. Killed after `limit`.
PartResult RunPart(const Part& part, absl::Duration limit, int log_fd);

// All in order, together within `limit`: a part is stopped when it has taken its budget and all
// that earlier ones left of theirs, and is skipped, saying so, when there is no time. `done` hears
// of each.
std::vector<PartResult> RunParts(const std::vector<Part>& parts, absl::Duration limit, int log_fd,
                                 const std::function<void(const PartResult&)>& done);

}  // namespace upipe::gpu_check
