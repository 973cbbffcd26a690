// Independent pieces of a plan on several threads.
#pragma once

#include <cstddef>
#include <functional>

#include "absl/status/status.h"

namespace upipe::planner {

// Calls run(0) to run(count - 1), each once, on up to `num_threads` threads, the caller's among
// them. Blocks until all have returned; the error of the first that has one.
absl::Status InThreads(int num_threads, size_t count,
                       const std::function<absl::Status(size_t index)>& run);

}  // namespace upipe::planner
