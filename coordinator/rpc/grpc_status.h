// absl::Status to grpc::Status, with google.rpc details in grpc-status-details-bin.
#pragma once

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace upipe::coordinator {

grpc::Status ToGrpc(const absl::Status& status);

// Why a request is refused that the deciding thread's queue has no room for.
absl::Status Busy();

}  // namespace upipe::coordinator
