// The ops of a CUDA device: products by cuBLASLt, attention by cuDNN or our own kernel, everything
// else by our own kernels. Results have the same bits from run to run, but for cuDNN's attention
// backward, which on Hopper adds in no fixed order: a deterministic job's is our own.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_table.h"

namespace upipe::kernels {

struct CudaOpTableOptions {
  std::string attention_kernel;  // kernels/cuda/workspace_bytes.h
  int multiprocessors = 0;
};

// For streams of the device current here. InvalidArgument for an attention kernel there is none of;
// FailedPrecondition when cuDNN is asked for and not found, or too old; any other version than the
// one that is named will do.
absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaOpTable(const CudaOpTableOptions& options);

}  // namespace upipe::kernels
