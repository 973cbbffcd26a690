// Scratch memory of every op on an NVIDIA Hopper device: plain C++, so that the dry run plans with
// the very bytes that the CUDA op table takes, on any machine.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_params.h"

namespace upipe::kernels::cuda {

// The attention kernels there are. cuDNN's reads O in backward and knows bf16 only; fp32 is ours.
enum class AttentionKernel { kOwn, kCudnn };
inline constexpr char kOwnAttention[] = "own";
inline constexpr char kCudnnAttention[] = "cudnn 9.19";  // the version whose workspaces are known

// InvalidArgument naming the kernels there are.
absl::StatusOr<AttentionKernel> ParseAttentionKernel(const std::string& name);

// True when the call goes to cuDNN.
bool UsesCudnn(AttentionKernel kernel, const TensorView& q);

int64_t WorkspaceBytes(const OpParams& params, AttentionKernel attention);

// Beside what grows with the call. One dense attention takes 256 bytes; packed documents take up to
// 131,840 forward and 230,528 backward in batches of kSdpaDocumentsMax, and must not change a size.
inline constexpr int64_t kCudnnFixedBytes = int64_t{256} << 10;

inline constexpr int64_t kSquaresBlock = 16384;  // elements of one partial sum of squares

}  // namespace upipe::kernels::cuda
