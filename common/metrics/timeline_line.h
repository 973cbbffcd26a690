// A step's timeline as one line of timeline.jsonl (docs/metrics.md): the one writer and the one
// reader of the format.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "upipe/v1/timeline.pb.h"

namespace upipe {

// A JSON object without line end. Slices and samples are arrays of numbers, which count into lists
// of names.
std::string FormatTimelineLine(const v1::StepTimeline& timeline);

// DataLoss saying what is wrong: also a slice or sample that counts into no name, or a slice that
// ends before it begins. Unknown members are ignored; `rank` and `step` must be there.
absl::StatusOr<v1::StepTimeline> ParseTimelineLine(absl::string_view text);

}  // namespace upipe
