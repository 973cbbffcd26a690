// A self check with the ranks of a job as threads of this process.
#pragma once

#include "absl/status/statusor.h"
#include "engine/train/selfcheck.h"

namespace upipe::planner {

// Blocking. Rank 0's report; else the error that ended the check, as RunSelfCheck names it.
absl::StatusOr<train::SelfCheckReport> CheckOnThreads(const v1::RunPlan& plan,
                                                      const train::SelfCheckOptions& options);

}  // namespace upipe::planner
