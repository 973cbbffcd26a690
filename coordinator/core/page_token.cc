#include "coordinator/core/page_token.h"

#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kNumberBytes = 8;

std::string BigEndian(uint64_t number) {
  std::string bytes;
  for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
  return bytes;
}

// FNV-1a over the filters and the number: the same in every process and version.
uint64_t Checksum(const v1::ListJobsRequest& request, uint64_t number) {
  std::string text = absl::StrCat(request.id_prefix(), "\n");
  const std::set<int> states(request.states().begin(), request.states().end());
  for (const int state : states) absl::StrAppend(&text, state, ",");
  if (request.has_submitted_from_unix_millis())
    absl::StrAppend(&text, "\nfrom ", request.submitted_from_unix_millis());
  if (request.has_submitted_until_unix_millis())
    absl::StrAppend(&text, "\nuntil ", request.submitted_until_unix_millis());
  text += BigEndian(number);
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

}  // namespace

std::string MakePageToken(const v1::ListJobsRequest& request, int64_t submit_number) {
  const auto number = static_cast<uint64_t>(submit_number);
  return absl::WebSafeBase64Escape(
      absl::StrCat(BigEndian(number), BigEndian(Checksum(request, number))));
}

std::optional<int64_t> ReadPageToken(const v1::ListJobsRequest& request, absl::string_view token) {
  std::string bytes;
  if (!absl::WebSafeBase64Unescape(token, &bytes) || bytes.size() != 2 * kNumberBytes)
    return std::nullopt;
  uint64_t number = 0;
  for (size_t i = 0; i < kNumberBytes; ++i)
    number = number << 8 | static_cast<unsigned char>(bytes[i]);
  const auto submit_number = static_cast<int64_t>(number);
  // Made again and compared: one spelling per token.
  if (MakePageToken(request, submit_number) != token) return std::nullopt;
  return submit_number;
}

}  // namespace upipe::coordinator
