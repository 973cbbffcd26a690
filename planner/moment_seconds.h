// Moments of a timeline priced by a device description, as TimeStep prices the step.
#pragma once

#include "planner/timeline.h"
#include "upipe/v1/device.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// `plan` needs what StepShape::From needs. Each moment hides only what its own computation covers,
// so that moments add up to a little more than the step where weights and copies are hidden behind
// later ones.
PriceMoment PriceBy(const v1::RunPlan& plan, const v1::DeviceFile& device);

}  // namespace upipe::planner
