// A self check's report for people and for programs.
#pragma once

#include <string>

#include "engine/train/selfcheck.h"

namespace upipe::planner {

// A table and, as the last line, the verdict.
std::string RenderSelfCheck(const v1::RunPlan& plan, const train::SelfCheckReport& report);

// One JSON object: "verdict", "passed", "failure" (absent when passed), "shape", "numbers",
// "gradients", "probes", "memory" (of the rank whose report it is).
std::string SelfCheckJson(const train::SelfCheckReport& report);

}  // namespace upipe::planner
