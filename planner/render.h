// A plan as text for people.
#pragma once

#include <string>

#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// Method and mesh, stages and chunks, bytes by category of the fullest rank and where its peak is,
// those in host memory where there are any, FLOPs, traffic, notes.
std::string RenderPlan(const v1::RunPlan& plan);

}  // namespace upipe::planner
