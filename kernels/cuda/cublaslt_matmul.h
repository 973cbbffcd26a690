// Matrix products by cuBLASLt: bf16 or fp32 operands, fp32 sums (never TF32), algorithms that sum
// in one order, and one plan per shape, alignment and types, kept for good.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_params.h"
#include "kernels/cuda/cuda_kernels.h"

namespace upipe::kernels {

// Of the library that is loaded: "13.1.0".
std::string CublasLtVersion();

// One host thread calls it. Its context is the device current at Create.
class CublasLtMatmul {
 public:
  static absl::StatusOr<std::unique_ptr<CublasLtMatmul>> Create();
  virtual ~CublasLtMatmul() = default;
  // Puts the product on the stream. `workspace` has kMatmulWorkspaceBytes. FailedPrecondition
  // naming the shape where cuBLASLt has no algorithm for it.
  virtual absl::Status Run(const MatmulParams& p, Workspace workspace,
                           const cuda::LaunchContext& context) = 0;
  // Makes the plans of the product, or says as Run why there is none.
  virtual absl::Status Prepare(const MatmulParams& p) = 0;
};

}  // namespace upipe::kernels
