// Before step 1: what the ranks' communicator took of the device, against what the plan leaves for
// it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// `bytes` of device memory that the communicator of this rank holds outside its arena.
// ResourceExhausted, with both numbers, where that is more than the plan reserves outside arenas
// and the arena leaves of the budget. Where the plan reserves nothing there is no limit.
absl::Status CheckCommunicatorMemory(const v1::RunPlan& plan, int rank, int64_t bytes);

}  // namespace upipe::train
