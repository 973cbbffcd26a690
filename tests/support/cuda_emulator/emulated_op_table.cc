#include "tests/support/cuda_emulator/emulated_op_table.h"

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/fault.h"
#include "kernels/cuda/workspace_bytes.h"
#include "kernels/host/host_op_table.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels {
namespace {

constexpr int kMultiprocessors = 132;

struct EmulatedCudaBackend {
  template <typename Params>
  static int64_t WorkspaceBytes(const Params& p) {
    return cuda::WorkspaceBytes(p, cuda::AttentionKernel::kOwn);
  }

  static absl::Status Run(const MatmulParams& p, Workspace workspace, ExecContext& context) {
    return reference::Backend::Run(p, workspace, context);
  }
  template <typename Params>
  static absl::Status Run(const Params& p, Workspace workspace, ExecContext& context) {
    using cuda_emulator::Order;
    CUstream_st stream;
    stream.order = context.parallel.num_threads() > 1 ? Order::kDescending : Order::kAscending;
    cuda::FaultWords fault = cuda::kNoFault;
    cuda::Run(p, workspace, {&stream, kMultiprocessors, fault.data()});
    if (!stream.error.empty()) return absl::InternalError(stream.error);
    return cuda::FaultStatus(fault);
  }
};

}  // namespace

std::unique_ptr<OpTable> CreateEmulatedCudaOpTable() {
  return std::make_unique<HostOpTable<EmulatedCudaBackend>>();
}

}  // namespace upipe::kernels
