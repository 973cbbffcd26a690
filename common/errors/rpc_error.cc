#include "common/errors/rpc_error.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/cord.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/utf8.h"

namespace upipe {
namespace {

// A call's trailing metadata holds 8 KiB by gRPC's default: message, every byte beyond ASCII as
// %XX; details with the message again, base64 over the details.
constexpr size_t kMaxMessageBytes = 700;
constexpr size_t kMaxDatumBytes = 100;
constexpr size_t kMaxViolationBytes = 400;
constexpr size_t kMaxViolationsBytes = 2000;

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kBadRequestUrl[] = "type.googleapis.com/google.rpc.BadRequest";

using Code = absl::StatusCode;

constexpr ReasonEntry kReasons[] = {
    {Reason::kSpecInvalid, "SPEC_INVALID", Code::kInvalidArgument},
    {Reason::kRequestInvalid, "REQUEST_INVALID", Code::kInvalidArgument},
    {Reason::kJobNotFound, "JOB_NOT_FOUND", Code::kNotFound},
    {Reason::kJobNotStarted, "JOB_NOT_STARTED", Code::kFailedPrecondition},
    {Reason::kJobEnded, "JOB_ENDED", Code::kFailedPrecondition},
    {Reason::kSlotsTooFew, "SLOTS_TOO_FEW", Code::kFailedPrecondition},
    {Reason::kJobIdTaken, "JOB_ID_TAKEN", Code::kUnavailable},
    {Reason::kStateDiskFull, "STATE_DISK_FULL", Code::kResourceExhausted},
    {Reason::kBackupFailed, "BACKUP_FAILED", Code::kUnavailable},
    {Reason::kCoordinatorBusy, "COORDINATOR_BUSY", Code::kUnavailable},
    {Reason::kCoordinatorStopping, "COORDINATOR_STOPPING", Code::kUnavailable},
    {Reason::kNodeNotFound, "NODE_NOT_FOUND", Code::kNotFound},
    {Reason::kNodeNotSilent, "NODE_NOT_SILENT", Code::kFailedPrecondition},
    {Reason::kNodeInUse, "NODE_IN_USE", Code::kFailedPrecondition},
    {Reason::kWorkerDisconnected, "WORKER_DISCONNECTED", Code::kUnavailable},
    {Reason::kWorkerLost, "WORKER_LOST", Code::kUnavailable},
    {Reason::kLogNotFound, "LOG_NOT_FOUND", Code::kNotFound},
    {Reason::kLogUnreadable, "LOG_UNREADABLE", Code::kUnavailable},
    {Reason::kLogLate, "LOG_LATE", Code::kUnavailable},
    {Reason::kLogBrokenOff, "LOG_BROKEN_OFF", Code::kUnavailable},
    {Reason::kCallerLeft, "CALLER_LEFT", Code::kCancelled},
    {Reason::kInternal, "INTERNAL", Code::kInternal},
    {Reason::kHelloInvalid, "HELLO_INVALID", Code::kInvalidArgument},
    {Reason::kHelloMissing, "HELLO_MISSING", Code::kAborted},
    {Reason::kWorkerNameTaken, "WORKER_NAME_TAKEN", Code::kAlreadyExists},
    {Reason::kEpochSuperseded, "EPOCH_SUPERSEDED", Code::kAborted},
    {Reason::kSessionReplaced, "SESSION_REPLACED", Code::kAborted},
    {Reason::kSessionExpired, "SESSION_EXPIRED", Code::kAborted},
    {Reason::kWorkerTooSlow, "WORKER_TOO_SLOW", Code::kResourceExhausted},
    {Reason::kLogUnwanted, "LOG_UNWANTED", Code::kCancelled},
    {Reason::kCoordinatorUnknown, "COORDINATOR_UNKNOWN", Code::kInvalidArgument},
    {Reason::kCoordinatorUnreachable, "COORDINATOR_UNREACHABLE", Code::kUnavailable},
    {Reason::kCallDropped, "CALL_DROPPED", Code::kUnavailable},
    {Reason::kCallLate, "CALL_LATE", Code::kDeadlineExceeded},
    {Reason::kJobAmbiguous, "JOB_AMBIGUOUS", Code::kInvalidArgument},
    {Reason::kJobFileInvalid, "JOB_FILE_INVALID", Code::kInvalidArgument},
    {Reason::kJobFileUnreadable, "JOB_FILE_UNREADABLE", Code::kInvalidArgument},
    {Reason::kJobNotEnded, "JOB_NOT_ENDED", Code::kDeadlineExceeded},
    {Reason::kNodeNotDrained, "NODE_NOT_DRAINED", Code::kDeadlineExceeded},
    {Reason::kNotConfirmed, "NOT_CONFIRMED", Code::kInvalidArgument},
    {Reason::kFileUnwritable, "FILE_UNWRITABLE", Code::kUnavailable},
    {Reason::kBackupDamaged, "BACKUP_DAMAGED", Code::kDataLoss},
};

constexpr bool IsInOrder() {
  for (size_t i = 0; i < std::size(kReasons); ++i) {
    if (kReasons[i].reason != static_cast<Reason>(i)) return false;
  }
  return true;
}
static_assert(IsInOrder(), "kReasons is indexed by Reason");

template <typename Message>
void Attach(absl::string_view url, const Message& message, absl::Status& status) {
  status.SetPayload(url, absl::Cord(message.SerializeAsString()));
}

template <typename Message>
Message PayloadOf(const absl::Status& status, absl::string_view url) {
  Message message;
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  if (payload && !message.ParseFromString(std::string(*payload))) message.Clear();
  return message;
}

}  // namespace

absl::Span<const ReasonEntry> Reasons() { return kReasons; }

const ReasonEntry& EntryOf(Reason reason) {
  const auto index = static_cast<size_t>(reason);
  UPIPE_CHECK(index < std::size(kReasons));
  return kReasons[index];
}

absl::Status RpcError(Reason reason, absl::string_view message, ErrorData data) {
  const ReasonEntry& entry = EntryOf(reason);
  absl::Status status(entry.code, message);
  google::rpc::ErrorInfo info;
  info.set_reason(std::string(entry.name));
  info.set_domain(kErrorDomain);
  for (const ErrorDatum& datum : data) {
    (*info.mutable_metadata())[datum.key] = ToUtf8(datum.value, kMaxDatumBytes);
  }
  Attach(kErrorInfoUrl, info, status);
  return status;
}

absl::Status InvalidFields(Reason reason, const std::vector<FieldViolation>& violations,
                           ErrorData data) {
  UPIPE_CHECK(!violations.empty());
  google::rpc::BadRequest bad_request;
  std::vector<std::string> lines;
  size_t bytes = 0, kept = 0;
  for (; kept < violations.size(); ++kept) {
    const std::string field = ToUtf8(violations[kept].field, kMaxViolationBytes);
    const std::string description = ToUtf8(violations[kept].description, kMaxViolationBytes);
    bytes += field.size() + description.size();
    if (kept > 0 && bytes > kMaxViolationsBytes) break;
    auto& violation = *bad_request.add_field_violations();
    violation.set_field(field);
    violation.set_description(description);
    lines.push_back(absl::StrCat(field, ": ", description));
  }
  if (kept < violations.size()) {
    auto& violation = *bad_request.add_field_violations();
    violation.set_field(ToUtf8(violations[kept].field, kMaxDatumBytes));
    violation.set_description(
        absl::StrCat("is wrong too, and ", violations.size() - kept - 1, " more fields"));
  }
  absl::Status status = RpcError(reason, absl::StrJoin(lines, "; "), data);
  Attach(kBadRequestUrl, bad_request, status);
  return status;
}

google::rpc::ErrorInfo ErrorInfoOf(const absl::Status& status) {
  return PayloadOf<google::rpc::ErrorInfo>(status, kErrorInfoUrl);
}

std::vector<FieldViolation> FieldViolationsOf(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  const auto bad_request = PayloadOf<google::rpc::BadRequest>(status, kBadRequestUrl);
  for (const auto& violation : bad_request.field_violations()) {
    violations.push_back({violation.field(), violation.description()});
  }
  return violations;
}

bool HasReason(const absl::Status& status, Reason reason) {
  return ErrorInfoOf(status).reason() == EntryOf(reason).name;
}

WireError EncodeError(const absl::Status& status) {
  google::rpc::Status details;
  details.set_code(static_cast<int>(status.code()));
  details.set_message(ToUtf8(status.message(), kMaxMessageBytes));
  if (ErrorInfoOf(status).reason().empty()) {
    google::rpc::ErrorInfo info;
    info.set_reason(std::string(EntryOf(Reason::kInternal).name));
    info.set_domain(kErrorDomain);
    details.add_details()->PackFrom(info);
  }
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    google::protobuf::Any& any = *details.add_details();
    any.set_type_url(std::string(url));
    any.set_value(std::string(payload));
  });
  return {details.message(), details.SerializeAsString()};
}

absl::Status DecodeError(absl::StatusCode code, absl::string_view message,
                         absl::string_view details) {
  absl::Status status(code, message);
  google::rpc::Status decoded;
  if (!decoded.ParseFromArray(details.data(), static_cast<int>(details.size()))) return status;
  for (const google::protobuf::Any& any : decoded.details()) {
    if (any.type_url() == kErrorInfoUrl || any.type_url() == kBadRequestUrl) {
      status.SetPayload(any.type_url(), absl::Cord(any.value()));
    }
  }
  return status;
}

}  // namespace upipe
