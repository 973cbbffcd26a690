// Moments and spans of time as people type them: --since, --grace, --time-limit.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace upipe::client {

// "90s", "1h30m", "3d", "2w"; zero or more, at most 100 years.
absl::StatusOr<absl::Duration> ParseSpan(absl::string_view text);

// "90s", "30m", "2h", "1h30m", "3d", "2w" before `now`; or "2026-01-31", "2026-01-31 08:15",
// "2026-01-31 08:15:30" in local time; or "2026-01-31T08:15:30Z".
absl::StatusOr<absl::Time> ParseMoment(absl::string_view text, absl::Time now);

}  // namespace upipe::client
