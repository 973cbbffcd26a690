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
constexpr size_t kMaxWorkerBytes = 64;
constexpr size_t kMaxReasonBytes = 500;
constexpr int64_t kMaxGraceMillis = int64_t{24} * 3600 * 1000;

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

std::vector<FieldViolation> WorkerViolations(const std::string& worker) {
  if (!worker.empty() && worker.size() <= kMaxWorkerBytes) return {};
  return {{"worker",
           absl::StrCat("has ", worker.size(), " characters, must have 1 to ", kMaxWorkerBytes)}};
}

void CheckReason(const std::string& reason, std::vector<FieldViolation>& violations) {
  if (reason.size() <= kMaxReasonBytes) return;
  violations.push_back(
      {"reason", absl::StrCat("has ", reason.size(), " bytes, at most ", kMaxReasonBytes)});
}

// Of a request whose grace_millis is optional.
template <typename Request>
void CheckGrace(const Request& request, std::vector<FieldViolation>& violations) {
  const int64_t grace = request.grace_millis();
  if (grace >= 0 && grace <= kMaxGraceMillis) return;
  violations.push_back(
      {"grace_millis", absl::StrCat("is ", grace, ", must be 0 to ", kMaxGraceMillis)});
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
  std::vector<FieldViolation> violations = IdViolations(request.id());
  CheckGrace(request, violations);
  return ToStatus(violations);
}

absl::Status CheckRequest(const v1::HoldRequest& request) {
  return ToStatus(IdViolations(request.id()));
}

absl::Status CheckRequest(const v1::ReleaseRequest& request) {
  return ToStatus(IdViolations(request.id()));
}

absl::Status CheckRequest(const v1::WhyRequest& request) {
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
  if (request.generation() < 0) {
    violations.push_back(
        {"generation", absl::StrCat("is ", request.generation(), ", must be 0 or more")});
  }
  if (!v1::RankFile_IsValid(request.file())) {
    violations.push_back(
        {"file", absl::StrCat("is ", static_cast<int>(request.file()),
                              ", must be a RankFile: 0 to ", static_cast<int>(v1::RankFile_MAX))});
  }
  if (request.file() == v1::RANK_FILE_JOB_STEPS && request.follow()) {
    violations.push_back({"follow",
                          "is true, and the coordinator's file cannot be followed: "
                          "Watch tells the steps as they come"});
  }
  return ToStatus(violations);
}

absl::Status CheckRequest(const v1::CordonRequest& request) {
  std::vector<FieldViolation> violations = WorkerViolations(request.worker());
  CheckReason(request.reason(), violations);
  return ToStatus(violations);
}

absl::Status CheckRequest(const v1::DrainRequest& request) {
  std::vector<FieldViolation> violations = WorkerViolations(request.worker());
  CheckReason(request.reason(), violations);
  CheckGrace(request, violations);
  return ToStatus(violations);
}

absl::Status CheckRequest(const v1::UncordonRequest& request) {
  return ToStatus(WorkerViolations(request.worker()));
}

absl::Status CheckRequest(const v1::FenceNodeRequest& request) {
  return ToStatus(WorkerViolations(request.worker()));
}

absl::Status CheckRequest(const v1::ForgetNodeRequest& request) {
  return ToStatus(WorkerViolations(request.worker()));
}

}  // namespace upipe::coordinator
