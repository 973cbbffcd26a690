// Scratch memory of every op on an NVIDIA Hopper device: plain C++, so that the dry run plans with
// the very bytes that the CUDA op table takes, on any machine.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/api/op_params.h"

namespace upipe::kernels::cuda {

// The attention kernels there are. cuDNN's backward reads O and adds in no fixed order;
// kCudnnForward leaves it to our own, which gives the same bits every time. cuDNN knows bf16 only;
// fp32 is ours.
enum class AttentionKernel { kOwn, kCudnn, kCudnnForward };
inline constexpr char kOwnAttention[] = "own";
inline constexpr char kCudnnAttention[] = "cudnn 9.19";  // the version whose workspaces are known

// "own", "cudnn 9.19" or "cudnn 9.19, own backward". Of every cuDNN 9 the scratch is counted
// as 9.19's until it was measured (kernels/api/scratch_table.h). InvalidArgument naming the kernels
// there are.
absl::StatusOr<AttentionKernel> ParseAttentionKernel(const std::string& name);

// The one that gives the same bits every time and is nearest to `name`.
std::string DeterministicAttention(const std::string& name);

// True when the call goes to cuDNN.
bool UsesCudnn(AttentionKernel kernel, const AttentionFwdParams& p);
bool UsesCudnn(AttentionKernel kernel, const AttentionBwdParams& p);

int64_t WorkspaceBytes(const OpParams& params, AttentionKernel attention);

// Beside what grows with the call. One dense attention takes 256 bytes; packed documents take up to
// 131,840 forward and 230,528 backward in batches of kSdpaDocumentsMax, and must not change a size.
inline constexpr int64_t kCudnnFixedBytes = int64_t{256} << 10;

inline constexpr int64_t kSquaresBlock = 16384;  // elements of one partial sum of squares

}  // namespace upipe::kernels::cuda
