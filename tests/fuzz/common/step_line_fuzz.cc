// A line of metrics.jsonl: any text is a step report that is written and read back the same, or an
// error.
#include <cstddef>
#include <cstdint>
#include <string>

#include "common/check.h"
#include "common/metrics/step_line.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::StatusOr<upipe::StepLine> line =
      upipe::ParseStepLine({reinterpret_cast<const char*>(data), size});
  if (!line.ok()) return 0;
  const std::string text = upipe::FormatStepLine(*line);
  const absl::StatusOr<upipe::StepLine> again = upipe::ParseStepLine(text);
  UPIPE_CHECK_OK(again.status()) << text;
  UPIPE_CHECK(upipe::FormatStepLine(*again) == text) << text;
  return 0;
}
