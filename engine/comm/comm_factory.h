// Communicators by backend name: the one place that knows which transports this build has.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/comm/comm_device.h"
#include "engine/comm/nccl/nccl_context.h"
#include "engine/comm/peer_context.h"
#include "engine/comm/ucx/ucx_communicator.h"

namespace upipe::comm {

struct PeerContextOptions {
  std::string backend = "cpu";  // of the ranks' devices
  int rank = 0;
  UcxOptions ucx;    // backends on host memory
  NcclOptions nccl;  // backend cuda, on the first device this process sees
};

// Ranks as processes: over UCX on host memory, over NCCL on cuda. FailedPrecondition naming the
// build option where this build lacks the transport.
absl::StatusOr<std::unique_ptr<PeerContext>> CreatePeerContext(const PeerContextOptions& options);

// What ranks as threads (inproc) need of the one device they share; null for backends on host
// memory. FailedPrecondition where this build or this machine lacks it.
absl::StatusOr<std::shared_ptr<CommDevice>> OpenCommDevice(const std::string& backend);

}  // namespace upipe::comm
