// A plan as a picture: memory by category over one step, beside what the device has.
#pragma once

#include <string>

#include "planner/timeline.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// An SVG file for light and dark backgrounds: device memory of the timeline's rank by category from
// moment to moment, the passes and layers, the peak, what the arena takes and, of plan.budget, the
// limit with what is reserved beyond it; host memory in a panel of its own where there is any.
// Across go seconds or, without rates, the share of the step's FLOPs. Without a budget the limit is
// train.memory_per_rank; without either there is none. The start and an evaluation are drawn only
// where they hold a peak.
std::string PlanSvg(const Timeline& timeline, const v1::RunPlan& plan);

}  // namespace upipe::planner
