// Job files are untrusted: any text ends in a spec that validates and is written and read back the
// same, or in an error that names a line. Behind NUL bytes follow overrides, as --set takes them.
#include <google/protobuf/util/message_differencer.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/utf8.h"

namespace upipe {
namespace {

constexpr size_t kOverridesMax = 4;

void Fuzz(absl::string_view input) {
  std::vector<std::string> parts = absl::StrSplit(input, absl::MaxSplits('\0', kOverridesMax));
  const std::string text = parts.front();
  parts.erase(parts.begin());
  const absl::StatusOr<v1::JobSpec> spec = ParseJobSpecYaml(text, "f", parts);
  if (!spec.ok()) {
    UPIPE_CHECK(absl::StartsWith(spec.status().message(), "f:") ||
                absl::StartsWith(spec.status().message(), "--set: "))
        << spec.status();
    const std::string message(spec.status().message());
    UPIPE_CHECK(ToUtf8(message, message.size()) == message) << absl::CHexEscape(message);
    return;
  }
  UPIPE_CHECK(ValidateJobSpec(*spec).empty());
  const absl::StatusOr<v1::JobSpec> again = ParseJobSpecYaml(JobSpecToYaml(*spec), "again");
  UPIPE_CHECK_OK(again.status());
  UPIPE_CHECK(google::protobuf::util::MessageDifferencer::Equals(*again, *spec))
      << JobSpecToYaml(*spec);
  const v1::JobSpec full = WithDefaults(*spec);
  UPIPE_CHECK(ValidateJobSpec(full).empty()) << JobSpecToYaml(*spec);
  JobSpecWarnings(full);
  PaddedContext(full);
}

}  // namespace
}  // namespace upipe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
