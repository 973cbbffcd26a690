// A line of timeline.jsonl: any text is a timeline that is written and read back the same, or an
// error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/check.h"
#include "common/metrics/timeline_line.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<upipe::v1::StepTimeline> timeline =
      upipe::ParseTimelineLine({reinterpret_cast<const char*>(data), size});
  if (!timeline.ok()) return 0;
  const std::string text = upipe::FormatTimelineLine(*timeline);
  const absl::StatusOr<upipe::v1::StepTimeline> again = upipe::ParseTimelineLine(text);
  UPIPE_CHECK_OK(again.status()) << text;
  UPIPE_CHECK(upipe::FormatTimelineLine(*again) == text) << text;
  return 0;
}
