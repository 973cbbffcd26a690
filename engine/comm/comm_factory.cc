#include "engine/comm/comm_factory.h"

#include <utility>

#include "common/status.h"
#ifdef UPIPE_HAS_CUDA
#include "engine/comm/nccl/cuda_comm_device.h"
#include "engine/comm/nccl/nccl_library.h"
#endif

namespace upipe::comm {
namespace {

constexpr char kCuda[] = "cuda";

#ifdef UPIPE_HAS_CUDA
absl::StatusOr<std::shared_ptr<CommDevice>> OpenCuda() { return OpenCudaCommDevice(0); }

absl::StatusOr<std::unique_ptr<PeerContext>> OverNccl(const PeerContextOptions& options) {
  UPIPE_ASSIGN_OR_RETURN(std::shared_ptr<CommDevice> device, OpenCuda());
  return NcclContext::Create(OpenNccl(), std::move(device), options.rank, options.nccl);
}
#else
absl::Status NoCuda() {
  return absl::FailedPreconditionError(
      "this build has neither the CUDA backend nor NCCL; configure it with UPIPE_WITH_CUDA=ON");
}
absl::StatusOr<std::shared_ptr<CommDevice>> OpenCuda() { return NoCuda(); }
absl::StatusOr<std::unique_ptr<PeerContext>> OverNccl(const PeerContextOptions&) {
  return NoCuda();
}
#endif

#ifdef UPIPE_HAS_UCX
absl::StatusOr<std::unique_ptr<PeerContext>> OverUcx(const PeerContextOptions& options) {
  return UcxContext::Create(options.ucx);
}
#else
absl::StatusOr<std::unique_ptr<PeerContext>> OverUcx(const PeerContextOptions&) {
  return absl::FailedPreconditionError(
      "this build has no UCX, over which ranks on host memory talk; configure it with "
      "UPIPE_WITH_UCX=ON");
}
#endif

}  // namespace

absl::StatusOr<std::unique_ptr<PeerContext>> CreatePeerContext(const PeerContextOptions& options) {
  return options.backend == kCuda ? OverNccl(options) : OverUcx(options);
}

absl::StatusOr<std::shared_ptr<CommDevice>> OpenCommDevice(const std::string& backend) {
  if (backend != kCuda) return nullptr;
  return OpenCuda();
}

}  // namespace upipe::comm
