#include "coordinator/rpc/grpc_status.h"

#include "common/errors/rpc_error.h"

namespace upipe::coordinator {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const WireError error = EncodeError(status);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), error.message, error.details);
}

absl::Status Busy() {
  return RpcError(Reason::kCoordinatorBusy, "the coordinator is busy or shutting down; try again");
}

}  // namespace upipe::coordinator
