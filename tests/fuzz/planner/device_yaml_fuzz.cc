// Device files come from whoever runs a cluster, and names of devices with jobs: any text ends in a
// description that is whole and is written and read back the same, or in an error that names a
// line.
#include <google/protobuf/util/message_differencer.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "common/check.h"
#include "common/utf8.h"
#include "planner/device_file.h"

namespace upipe::planner {
namespace {

void Fuzz(absl::string_view text) {
  const absl::StatusOr<v1::DeviceFile> device = ParseDeviceFile(text, "f");
  if (!device.ok()) {
    const std::string message(device.status().message());
    UPIPE_CHECK(absl::StartsWith(message, "f:")) << message;
    UPIPE_CHECK(ToUtf8(message, message.size()) == message) << absl::CHexEscape(message);
    return;
  }
  UPIPE_CHECK(CheckDeviceFile(*device).empty());
  const std::string written = DeviceFileToYaml(*device);
  if (written.size() > kMaxDeviceFileBytes) return;  // escapes are longer than what they stand for
  const absl::StatusOr<v1::DeviceFile> again = ParseDeviceFile(written, "again");
  UPIPE_CHECK_OK(again.status());
  UPIPE_CHECK(google::protobuf::util::MessageDifferencer::Equals(*again, *device)) << written;
}

}  // namespace
}  // namespace upipe::planner

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::planner::Fuzz({reinterpret_cast<const char*>(data), size});
  return 0;
}
