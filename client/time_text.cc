#include "client/time_text.h"

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kLongestSpan = absl::Hours(24 * 365 * 100);

// "3d" and "2w" beside what absl::ParseDuration reads.
bool ReadSpan(absl::string_view text, absl::Duration& span) {
  if (text.empty()) return false;
  const char unit = text.back();
  if (unit == 'd' || unit == 'w') {
    double count = 0;
    if (!absl::SimpleAtod(text.substr(0, text.size() - 1), &count)) return false;
    span = absl::Hours(24 * (unit == 'w' ? 7 : 1)) * count;
  } else if (!absl::ParseDuration(text, &span)) {
    return false;
  }
  return span >= absl::ZeroDuration() && span <= kLongestSpan;
}

}  // namespace

absl::StatusOr<absl::Duration> ParseSpan(absl::string_view text) {
  absl::Duration span;
  if (ReadSpan(text, span)) return span;
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "' is no span of time; write 30s, 5m, 2h or 3d"));
}

absl::StatusOr<absl::Time> ParseMoment(absl::string_view text, absl::Time now) {
  absl::Duration span;
  if (ReadSpan(text, span)) return now - span;
  absl::Time time;
  std::string error;
  if (absl::ParseTime(absl::RFC3339_full, text, &time, &error)) return time;
  for (const char* format : {"%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S"}) {
    if (absl::ParseTime(format, text, absl::LocalTimeZone(), &time, &error)) return time;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text, "' is no time; write 30m, 2h or 3d for so long ago, or 2026-01-31 08:15"));
}

}  // namespace upipe::client
