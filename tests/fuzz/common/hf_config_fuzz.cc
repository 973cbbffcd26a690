// config.json files are untrusted: any text ends in a model that can be written and read back, or
// in problems that print on one line.
#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "common/check.h"
#include "common/spec/hf_config.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/utf8.h"

namespace upipe {
namespace {

constexpr size_t kLineMax = 600;

bool PrintsOnOneLine(const std::string& text) {
  return ToUtf8(text, text.size()) == text && text.size() < kLineMax &&
         std::none_of(text.begin(), text.end(), absl::ascii_iscntrl);
}

v1::JobSpec JobOf(const v1::ModelSpec& model) {
  absl::StatusOr<v1::JobSpec> spec = ParseJobSpecYaml(
      "name: a\nmodel: {preset: tiny}\ndata: {path: b}\n"
      "parallel: {ranks: 1, method: upipe, heads_per_stage: 1}\ntrain: {context: 1, steps: 1}\n",
      "job");
  UPIPE_CHECK_OK(spec.status());
  *spec->mutable_model() = model;
  return *std::move(spec);
}

void Fuzz(absl::string_view json) {
  v1::ModelSpec model;
  const std::vector<Violation> violations = ReadHfConfig(json, model);
  for (const Violation& violation : violations) {
    UPIPE_CHECK(PrintsOnOneLine(violation.field) && PrintsOnOneLine(violation.message))
        << absl::CHexEscape(violation.field) << ": " << absl::CHexEscape(violation.message);
  }
  if (!violations.empty()) return;
  const v1::JobSpec spec = JobOf(model);
  if (!ValidateJobSpec(spec).empty()) return;
  const absl::StatusOr<v1::JobSpec> again = ParseJobSpecYaml(JobSpecToYaml(spec), "again");
  UPIPE_CHECK_OK(again.status());
  UPIPE_CHECK(google::protobuf::util::MessageDifferencer::Equals(*again, spec))
      << JobSpecToYaml(spec);
}

}  // namespace
}  // namespace upipe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
