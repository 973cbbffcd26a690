// Finds every checkpoint below a folder and reads all of it.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "upipe/v1/report.pb.h"

namespace upipe::checkpoint {

struct Verdict {
  std::string path;       // of the step's folder
  absl::Status status;    // NotFound: unfinished, no manifest
  v1::CheckpointRef ref;  // where status is OK
};

// Calls `on_verdict` for every folder s<step> below `path`, or for `path` itself where it is one,
// in order of paths. An error only when a folder cannot be listed.
absl::Status VerifyBelow(const std::string& path,
                         const std::function<void(const Verdict&)>& on_verdict);

}  // namespace upipe::checkpoint
