// The ops of a CUDA device: products by cuBLASLt, attention by cuDNN or our own kernel, everything
// else by our own kernels. Results have the same bits from run to run, but for cuDNN's attention
// backward, which on Hopper adds in no fixed order.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_table.h"

namespace upipe::kernels {

struct CudaOpTableOptions {
  std::string attention_kernel;  // "own" or "cudnn 9.19" (kernels/cuda/workspace_bytes.h)
  int multiprocessors = 0;
};

// For streams of the device current here. InvalidArgument for an attention kernel there is none of;
// FailedPrecondition when cuDNN is asked for and not found, or is of another version.
absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(const CudaOpTableOptions& options);

}  // namespace upipe::kernels
