// Attention ops done by calls of cuDNN (sdpa_library.h): one plan per shape, mask and layout, kept
// for good; its bf16 results are written, merged or added into ours by own kernels.
#pragma once

#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/api/op_params.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/sdpa_library.h"

namespace upipe::kernels {

// Only for calls that SdpaTakes. One host thread calls it.
class SdpaAttention {
 public:
  explicit SdpaAttention(std::unique_ptr<SdpaLibrary> library) : library_(std::move(library)) {}

  // Put the op on the stream. ResourceExhausted when a plan takes more scratch than is left of
  // `workspace`; FailedPrecondition where the library has no plan.
  absl::Status Run(const AttentionFwdParams& p, Workspace workspace,
                   const cuda::LaunchContext& context);
  absl::Status Run(const AttentionBwdParams& p, Workspace workspace,
                   const cuda::LaunchContext& context);

  // Scratch that Run takes, by the plans the library makes for it.
  absl::StatusOr<int64_t> ScratchBytes(const AttentionFwdParams& p);
  absl::StatusOr<int64_t> ScratchBytes(const AttentionBwdParams& p);

 private:
  absl::StatusOr<SdpaPlan*> PlanFor(const SdpaPlanKey& key);
  absl::Status Execute(const SdpaCall& call, SdpaBound& bound, Workspace scratch,
                       CudaStreamHandle stream);

  const std::unique_ptr<SdpaLibrary> library_;
  std::map<SdpaPlanKey, std::unique_ptr<SdpaPlan>> plans_;
};

}  // namespace upipe::kernels
