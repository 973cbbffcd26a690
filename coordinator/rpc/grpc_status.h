// absl::Status to grpc::Status, with google.rpc details: ErrorInfo always, and whatever payloads
// the status carries.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace upipe::coordinator {

grpc::Status ToGrpc(const absl::Status& status);

}  // namespace upipe::coordinator
