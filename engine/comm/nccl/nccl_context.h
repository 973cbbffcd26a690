// Ranks as processes over NCCL, each with a device of its own. The only header of this folder that
// others include, beside the two tables it is made over (nccl_api, comm_device).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "engine/comm/comm_device.h"
#include "engine/comm/nccl/nccl_api.h"
#include "engine/comm/peer_context.h"

namespace upipe::comm {

struct NcclOptions {
  int channels = 16;  // NcclConfig::channels
  absl::Duration connect_deadline = absl::Minutes(2);
  absl::Duration close_deadline = absl::Seconds(10);
};

// Rank 0's address carries NCCL's unique id; every rank's says which device it is on and which
// NCCL it loaded.
class NcclContext : public PeerContext {
 public:
  static absl::StatusOr<std::unique_ptr<NcclContext>> Create(std::shared_ptr<NcclApi> api,
                                                             std::shared_ptr<CommDevice> device,
                                                             int rank, const NcclOptions& options);

  // FailedPrecondition when two ranks are on one device, or have loaded different versions of NCCL.
  absl::StatusOr<std::unique_ptr<Communicator>> Connect(const PeerGroup& group,
                                                        const CommOptions& options) override = 0;

  // What the device has less to give after Connect than before.
  int64_t device_bytes() const override = 0;
};

}  // namespace upipe::comm
