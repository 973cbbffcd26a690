// Measured steps as a trace: a process per rank, a thread per stream, slices of step, pass, layer
// and stage inside each other, and counters of memory by category. Pure.
#pragma once

#include <string>
#include <vector>

#include "upipe/v1/timeline.pb.h"

namespace upipe::trace {

// Chrome trace-event JSON (trace_events.h). `job` names the processes; steps lie where their wall
// clocks say, the earliest at 0. Slices whose stage has no name are left out.
std::string StepTrace(const std::string& job, const std::vector<v1::StepTimeline>& steps);

}  // namespace upipe::trace
