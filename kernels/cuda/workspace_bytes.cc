#include "kernels/cuda/workspace_bytes.h"

#include <algorithm>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/rounding.h"
#include "kernels/cuda/launch_shape.h"

namespace upipe::kernels::cuda {
namespace {

// What the cuBLAS guide advises for Hopper (cublasSetWorkspace), as PyTorch does since its #120925.
constexpr int64_t kMatmulBytes = int64_t{32} << 20;
constexpr char kOwnBackward[] = ", own backward";
constexpr int64_t kF32Bytes = 4, kBf16Bytes = 2, kF64Bytes = 8;

// A partial row for each block of rows, and for those that another number of rows would have: plans
// go from short steps to long ones.
int64_t RowPartials(int64_t rows, int64_t columns) {
  return std::min(rows, kReductionBlocksMax) * columns * kF32Bytes;
}

// Distinct K/V heads of a call.
int64_t KvHeads(const std::vector<int32_t>& kv_slot) {
  return static_cast<int64_t>(std::set<int32_t>(kv_slot.begin(), kv_slot.end()).size());
}

// cuDNN 9.19, SM90, sizes its finalised plans report (docs/planning-throughput.md, "Workspaces").
// Forward: a fixed block. It writes bf16, so an fp32 output is first written beside, and merging
// takes the log-sum-exp of the run too.
int64_t CudnnForwardBytes(const AttentionFwdParams& p) {
  const int64_t rows = p.q.shape[0] * p.q.shape[1];
  int64_t bytes = kCudnnFixedBytes;
  if (p.o.dtype == DType::kFloat32) bytes += kBf16Bytes * rows * p.q.shape[2];
  if (p.merge) bytes += kF32Bytes * rows;
  return bytes;
}

// Backward of h heads over k K/V heads: dQ in fp32 and delta, 4 h Sq D + 4 h Sq (516 h Sq at
// D = 128); with h > k, dK and dV of every query head, 4 h Skv D. Then the bf16 dq, dk and dv it
// writes, which are added to ours in fp32.
int64_t CudnnBackwardBytes(const AttentionBwdParams& p) {
  const int64_t queries = p.q.shape[0], heads = p.q.shape[1], dim = p.q.shape[2];
  const int64_t keys = p.k.shape[0], kv_heads = KvHeads(p.kv_slot);
  int64_t bytes = kF32Bytes * heads * queries * (dim + 1) + kCudnnFixedBytes;
  if (heads > kv_heads) bytes += 2 * kBf16Bytes * heads * keys * dim;
  return bytes + kBf16Bytes * dim * (heads * queries + 2 * kv_heads * keys);
}

// What is not listed keeps all it needs in registers and shared memory.
template <typename Params>
int64_t Bytes(const Params&, AttentionKernel) {
  return 0;
}

int64_t Bytes(const MatmulParams&, AttentionKernel) { return kMatmulBytes; }

int64_t Bytes(const AttentionFwdParams& p, AttentionKernel attention) {
  return UsesCudnn(attention, p) ? CudnnForwardBytes(p) : 0;
}

int64_t Bytes(const AttentionBwdParams& p, AttentionKernel attention) {
  return UsesCudnn(attention, p) ? CudnnBackwardBytes(p) : 0;
}

int64_t Bytes(const RmsNormBwdParams& p, AttentionKernel) {
  const int64_t columns = p.weight.shape[0];
  return RowPartials(p.x.num_elements() / columns, columns);
}

int64_t Bytes(const ColumnSumParams& p, AttentionKernel) {
  return RowPartials(p.x.shape[0], p.x.shape[1]);
}

int64_t Bytes(const SumOfSquaresParams& p, AttentionKernel) {
  return CeilDiv(p.x.shape[0], kSquaresBlock) * kF64Bytes;
}

int64_t Bytes(const CrossEntropyParams& p, AttentionKernel) {
  return p.logits.shape[0] * kF64Bytes;
}

}  // namespace

absl::StatusOr<AttentionKernel> ParseAttentionKernel(const std::string& name) {
  if (name == kOwnAttention) return AttentionKernel::kOwn;
  absl::string_view version = name;
  const bool own_backward = absl::ConsumeSuffix(&version, kOwnBackward);
  if (absl::ConsumePrefix(&version, "cudnn 9.") && !version.empty() &&
      std::all_of(version.begin(), version.end(), absl::ascii_isdigit)) {
    return own_backward ? AttentionKernel::kCudnnForward : AttentionKernel::kCudnn;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown attention kernel \"", name, "\" of backend cuda; there are ", kOwnAttention, ", ",
      kCudnnAttention, " or another version of cuDNN 9, and ", kCudnnAttention, kOwnBackward));
}

std::string DeterministicAttention(const std::string& name) {
  const bool other = name != kOwnAttention && !absl::EndsWith(name, kOwnBackward);
  return other ? absl::StrCat(name, kOwnBackward) : name;
}

bool UsesCudnn(AttentionKernel kernel, const AttentionFwdParams& p) {
  return kernel != AttentionKernel::kOwn && p.q.dtype == DType::kBFloat16;
}
bool UsesCudnn(AttentionKernel kernel, const AttentionBwdParams& p) {
  return kernel == AttentionKernel::kCudnn && p.q.dtype == DType::kBFloat16;
}

int64_t WorkspaceBytes(const OpParams& params, AttentionKernel attention) {
  return std::visit([attention](const auto& p) { return Bytes(p, attention); }, params);
}

}  // namespace upipe::kernels::cuda
