// What to change about a job that does not fit, priced before it is said.
#pragma once

#include <string>

#include "planner/pricing.h"
#include "upipe/v1/job.pb.h"

namespace upipe::planner {

// The nearest change that fits, as a clause: the one field that costs least time ("memory.overlap:
// false would fit, 1.2 % slower"); where none alone does, everything left to the planner; else the
// longest context of any method and policy; else that nothing of these does. `spec` has defaults
// and does not fit.
absl::StatusOr<std::string> NearestChange(const v1::JobSpec& spec, const Pricing& pricing);

// Why a whole plan with nothing auto is refused: ResourceExhausted naming the rank or node, bytes
// asked and available, the moment and the largest category of its peak, and, with `advise`, the
// nearest change.
absl::Status Refusal(const v1::RunPlan& plan, const Pricing& pricing, bool advise);

}  // namespace upipe::planner
