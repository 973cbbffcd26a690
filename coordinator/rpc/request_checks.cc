#include "coordinator/rpc/request_checks.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxIdBytes = 70;
constexpr size_t kMaxRequestIdBytes = 128;

bool IsIdCharacter(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'; }

std::vector<FieldViolation> IdViolations(const std::string& id) {
  if (id.empty() || id.size() > kMaxIdBytes) {
    return {{"id", absl::StrCat("has ", id.size(), " characters, must have 1 to ", kMaxIdBytes)}};
  }
  if (!std::all_of(id.begin(), id.end(), IsIdCharacter)) {
    return {{"id", "has characters other than a-z, 0-9 and '-'"}};
  }
  return {};
}

absl::Status ToStatus(const std::vector<FieldViolation>& violations) {
  return violations.empty() ? absl::OkStatus() : InvalidFields(Reason::kRequestInvalid, violations);
}

}  // namespace

absl::Status CheckRequest(const v1::SubmitRequest& request) {
  const std::string& id = request.request_id();
  if (id.empty() || id.size() > kMaxRequestIdBytes) {
    return ToStatus({{"request_id", absl::StrCat("has ", id.size(), " characters, must have 1 to ",
                                                 kMaxRequestIdBytes)}});
  }
  const bool control = std::any_of(id.begin(), id.end(), [](char c) {
    return absl::ascii_iscntrl(static_cast<unsigned char>(c));
  });
  return ToStatus(control ? std::vector<FieldViolation>{{"request_id", "has control characters"}}
                          : std::vector<FieldViolation>());
}

absl::Status CheckRequest(const v1::GetJobRequest& request) {
  return ToStatus(IdViolations(request.id()));
}

absl::Status CheckRequest(const v1::CancelRequest& request) {
  return ToStatus(IdViolations(request.id()));
}

absl::Status CheckRequest(const v1::WatchRequest& request) {
  return ToStatus(IdViolations(request.id()));
}

absl::Status CheckRequest(const v1::LogsRequest& request) {
  std::vector<FieldViolation> violations = IdViolations(request.id());
  if (request.rank() < 0) {
    violations.push_back({"rank", absl::StrCat("is ", request.rank(), ", must be 0 or more")});
  }
  return ToStatus(violations);
}

}  // namespace upipe::coordinator
