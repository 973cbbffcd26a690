#include "kernels/dry/cuda_stand_in.h"

#include "common/check.h"
#include "common/status.h"

namespace upipe::kernels {
namespace {

class CudaStandIn final : public OpTable {
 public:
  explicit CudaStandIn(cuda::AttentionKernel attention) : attention_(attention) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return cuda::WorkspaceBytes(params, attention_);
  }
  bool AttentionBwdReadsOutput() const override {
    return attention_ == cuda::AttentionKernel::kCudnn;
  }
  absl::Status Enqueue(const OpParams& params, Workspace, Stream&) override {
    UPIPE_CHECK(false) << NameOf(params) << " on a stand-in for a CUDA device";
    return absl::OkStatus();
  }

 private:
  const cuda::AttentionKernel attention_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaStandIn(const std::string& attention_kernel) {
  UPIPE_ASSIGN_OR_RETURN(const cuda::AttentionKernel attention,
                         cuda::ParseAttentionKernel(attention_kernel));
  return std::make_unique<CudaStandIn>(attention);
}

}  // namespace upipe::kernels
