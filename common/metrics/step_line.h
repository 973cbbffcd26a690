// A step report as one line of metrics.jsonl (docs/metrics.md): the one writer and the one reader
// of the format, for the coordinator's file of a job, the workers' of each rank and `upipe run
// --metrics`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/report.pb.h"

namespace upipe {

struct StepLine {
  int rank = 0;
  int64_t missing_steps = 0;  // right before this one that the file lacks
  v1::StepReport report;
};

// A JSON object without line end, its members in a fixed order. NaN and infinity are written as
// null; memory tags that never held anything, and a host pool that never did, are left out.
std::string FormatStepLine(const StepLine& line);

// DataLoss saying what is wrong. Unknown members are ignored, null numbers are NaN, absent ones
// zero; `rank` and `step` must be there.
absl::StatusOr<StepLine> ParseStepLine(absl::string_view text);

}  // namespace upipe
