// A plan as a trace that Perfetto and chrome://tracing open: what the rank computes, exchanges and
// copies when, beside its memory by category.
#pragma once

#include <string>

#include "planner/timeline.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// Chrome trace-event JSON. Tracks of slices: the step (pass, layer and stage inside each other),
// compute, exchange, host copies; counters: bytes by category of the device and, where it is used,
// of the host. One slice per moment and track, a few counters, so the size does not grow with the
// context. Without rates a step lasts one second, shared out by FLOPs, and there is only the first
// track.
std::string PlanTrace(const Timeline& timeline, const v1::RunPlan& plan);

}  // namespace upipe::planner
