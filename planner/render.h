// A plan as text for people.
#pragma once

#include <string>

#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// Method, stages, bytes by category of the fullest rank and where its peak is, FLOPs, traffic,
// notes.
std::string RenderPlan(const v1::RunPlan& plan);

}  // namespace upipe::planner
