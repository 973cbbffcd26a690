#include "kernels/cuda/cuda_op_table.h"

#include <cuda_runtime_api.h>

#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/api/workspace_check.h"
#include "kernels/cuda/cublaslt_matmul.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/cudnn_library.h"
#include "kernels/cuda/sdpa_attention.h"
#include "kernels/cuda/workspace_bytes.h"

namespace upipe::kernels {
namespace {

template <typename P>
constexpr bool kIsAttention =
    std::is_same_v<P, AttentionFwdParams> || std::is_same_v<P, AttentionBwdParams>;

class CudaOpTable final : public OpTable {
 public:
  CudaOpTable(const CudaOpTableOptions& options, cuda::AttentionKernel kernel,
              std::unique_ptr<CublasLtMatmul> matmul, std::unique_ptr<SdpaAttention> attention)
      : options_(options),
        kernel_(kernel),
        matmul_(std::move(matmul)),
        attention_(std::move(attention)) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return cuda::WorkspaceBytes(params, kernel_);
  }
  bool AttentionBwdReadsOutput() const override { return kernel_ == cuda::AttentionKernel::kCudnn; }
  std::string libraries() const override {
    const std::string cublas = absl::StrCat("cuBLASLt ", CublasLtVersion());
    return attention_ == nullptr ? cublas : absl::StrCat(cublas, ", cuDNN ", CudnnVersion());
  }

  absl::StatusOr<int64_t> Prepare(const OpParams& params) override {
    return std::visit([this](const auto& p) { return PrepareOp(p); }, params);
  }

  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    UPIPE_RETURN_IF_ERROR(Validate(params));
    UPIPE_RETURN_IF_ERROR(CheckWorkspace(params, workspace, WorkspaceBytes(params)));
    CudaStream& cuda = CudaStream::Of(stream);
    cuda.Issue(NameOf(params), [&](CudaStreamHandle handle) {
      const cuda::LaunchContext context = {.stream = handle,
                                           .multiprocessors = options_.multiprocessors,
                                           .fault = cuda.fault_words()};
      UPIPE_RETURN_IF_ERROR(
          std::visit([&](const auto& p) { return Run(p, workspace, context); }, params));
      return CudaStatus(cudaGetLastError(), NameOf(params));
    });
    return absl::OkStatus();
  }

 private:
  template <typename P>
  bool GoesToCudnn(const P& p) const {
    return cuda::UsesCudnn(kernel_, p) && SdpaTakes(p);
  }

  absl::StatusOr<int64_t> PrepareOp(const MatmulParams& p) {
    UPIPE_RETURN_IF_ERROR(matmul_->Prepare(p));
    return WorkspaceBytes(p);  // the most that an algorithm may take
  }
  template <typename P>
  absl::StatusOr<int64_t> PrepareOp(const P& p) {
    if constexpr (kIsAttention<P>) {
      if (GoesToCudnn(p)) return attention_->ScratchBytes(p);
    }
    return WorkspaceBytes(p);
  }

  absl::Status Run(const MatmulParams& p, Workspace workspace, const cuda::LaunchContext& context) {
    return matmul_->Run(p, workspace, context);
  }
  template <typename P>
  absl::Status Run(const P& p, Workspace workspace, const cuda::LaunchContext& context) {
    if constexpr (kIsAttention<P>) {
      if (GoesToCudnn(p)) return attention_->Run(p, workspace, context);
    }
    cuda::Run(p, workspace, context);
    return absl::OkStatus();
  }

  const CudaOpTableOptions options_;
  const cuda::AttentionKernel kernel_;
  const std::unique_ptr<CublasLtMatmul> matmul_;
  const std::unique_ptr<SdpaAttention> attention_;  // null: ours alone
};

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(const CudaOpTableOptions& options) {
  UPIPE_ASSIGN_OR_RETURN(const cuda::AttentionKernel kernel,
                         cuda::ParseAttentionKernel(options.attention_kernel));
  std::unique_ptr<SdpaAttention> attention;
  if (kernel != cuda::AttentionKernel::kOwn) {
    UPIPE_ASSIGN_OR_RETURN(std::unique_ptr<SdpaLibrary> library, OpenCudnn());
    attention = std::make_unique<SdpaAttention>(std::move(library));
  }
  UPIPE_ASSIGN_OR_RETURN(auto matmul, CublasLtMatmul::Create());
  return std::make_unique<CudaOpTable>(options, kernel, std::move(matmul), std::move(attention));
}

}  // namespace upipe::kernels
