// The parts of the check, in the order in which they run.
#pragma once

#include <vector>

#include "tools/gpu_check/check_device.h"
#include "tools/gpu_check/run_parts.h"

namespace upipe::gpu_check {

// One function per file; each says in `cases` what it runs.
Part MachinePart(const Settings& settings);
Part OpSuitePart(const Settings& settings);               // op_suites.cc
Part LibrarySuitePart(const Settings& settings);          // op_suites.cc
Part AttentionRowsPart(const Settings& settings);         // attention_rows.cc
Part RepeatPart(const Settings& settings);                // repeat.cc
Part WorkspacePart(const Settings& settings);             // repeat.cc
Part TimingPart(const Settings& settings);                // op_suites.cc
Part InvariancePart(const Settings& settings);            // op_suites.cc
Part ElementwisePart(const Settings& settings);           // rates.cc
Part MatmulPart(const Settings& settings);                // rates.cc
Part AttentionRatesPart(const Settings& settings);        // rates.cc
Part StepPart(const Settings& settings, int64_t tokens);  // training_step.cc

std::vector<Part> AllParts(const Settings& settings);

}  // namespace upipe::gpu_check
