// Errors as callers of the API see them: an absl::Status with google.rpc details, whose reason is
// one of a closed list (docs/errors.md explains each). Coordinator and client share it, so that
// programs test the same words wherever an error was made. No gRPC here: rpc/ folders move the
// encoded details.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "upipe/v1/rpc_error.pb.h"

namespace upipe {

// ErrorInfo.domain of every reason.
inline constexpr char kErrorDomain[] = "upipe";

// Stable: a reason is never renamed and never changes its code.
enum class Reason {
  // Requests of clients, refused by the coordinator.
  kSpecInvalid,
  kRequestInvalid,
  kJobNotFound,
  kJobNotStarted,
  kJobEnded,
  kSlotsTooFew,
  kJobIdTaken,
  kStateDiskFull,
  kBackupFailed,
  kCoordinatorBusy,
  kCoordinatorStopping,
  kNodeNotFound,
  kNodeNotSilent,
  kNodeInUse,
  kWorkerDisconnected,
  kWorkerLost,
  kLogNotFound,
  kLogUnreadable,
  kLogLate,
  kLogBrokenOff,
  kCallerLeft,
  kInternal,
  // Streams of workers, ended by the coordinator.
  kHelloInvalid,
  kHelloMissing,
  kWorkerNameTaken,
  kEpochSuperseded,
  kSessionReplaced,
  kSessionExpired,
  kWorkerTooSlow,
  kLogUnwanted,
  // Found by the client itself.
  kCoordinatorUnknown,
  kCoordinatorUnreachable,
  kCallDropped,
  kCallLate,
  kJobAmbiguous,
  kJobFileInvalid,
  kJobFileUnreadable,
  kJobNotEnded,
  kNodeNotDrained,
  kNotConfirmed,
  kFileUnwritable,
  kBackupDamaged,
};

struct ReasonEntry {
  Reason reason;
  absl::string_view name;  // "JOB_NOT_FOUND"
  absl::StatusCode code;
};
// Every reason, in the order of the enum.
absl::Span<const ReasonEntry> Reasons();
const ReasonEntry& EntryOf(Reason reason);

// One number or name of ErrorInfo.metadata.
struct ErrorDatum {
  ErrorDatum(absl::string_view name, const absl::AlphaNum& text) : key(name), value(text.Piece()) {}
  std::string key;
  std::string value;
};
using ErrorData = std::initializer_list<ErrorDatum>;

// One wrong field of a request, by its path of proto names ("spec.model.num_heads").
struct FieldViolation {
  std::string field;
  std::string description;
};

// An error of the reason's code.
absl::Status RpcError(Reason reason, absl::string_view message, ErrorData data = {});

// The same with google.rpc.BadRequest: the message lists the violations. Those past the first 2,000
// bytes are counted in the last one, for the trailing metadata of a call holds 8 KiB in all.
absl::Status InvalidFields(Reason reason, const std::vector<FieldViolation>& violations,
                           ErrorData data = {});

// What `status` carries: an empty ErrorInfo, no violations, when it carries none.
google::rpc::ErrorInfo ErrorInfoOf(const absl::Status& status);
std::vector<FieldViolation> FieldViolationsOf(const absl::Status& status);
bool HasReason(const absl::Status& status, Reason reason);

// An error as a call carries it: the message, cut to 700 bytes of UTF-8, and google.rpc.Status
// serialized, for grpc-status-details-bin. An error without a reason gets INTERNAL beside its own
// code: a bug of whoever made it.
struct WireError {
  std::string message;
  std::string details;
};
WireError EncodeError(const absl::Status& status);

// The error a call ended with, from its code, message and the bytes of grpc-status-details-bin,
// which may be empty or anything else.
absl::Status DecodeError(absl::StatusCode code, absl::string_view message,
                         absl::string_view details);

}  // namespace upipe
