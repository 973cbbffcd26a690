// What ops on an NVIDIA Hopper device ask for, without one: scratch bytes and what attention's
// backward reads, so that plans for cuda can be made on any machine. Nothing runs on it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_table.h"
#include "kernels/cuda/workspace_bytes.h"

namespace upipe::kernels {

// The attention kernels there are plans for.
using cuda::DeterministicAttention;
using cuda::kCudnnAttention;
using cuda::kOwnAttention;

// InvalidArgument naming the kernels there are. Enqueue is never called on it.
absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaStandIn(const std::string& attention_kernel);

}  // namespace upipe::kernels
