#include "kernels/dry/cuda_stand_in.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"

namespace upipe::kernels {
namespace {

// What the cuBLAS guide advises for Hopper (cublasSetWorkspace), as PyTorch does since its #120925.
constexpr int64_t kMatmulBytes = int64_t{32} << 20;
constexpr int64_t kF32Bytes = 4, kBf16Bytes = 2, kF64Bytes = 8;
// Blocks of a reduction over rows: one per multiprocessor of an H100 SXM, each with its own row.
constexpr int64_t kReductionBlocks = 132;
constexpr int64_t kSquaresBlock = 16384;  // elements of one partial sum of squares
constexpr int64_t kCudnnFixedBytes = 256;

int64_t RowPartials(int64_t rows, int64_t columns) {
  return std::min(rows, kReductionBlocks) * columns * kF32Bytes;
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

class CudaStandIn final : public OpTable {
 public:
  explicit CudaStandIn(bool cudnn) : cudnn_(cudnn) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return std::visit([this](const auto& p) { return Bytes(p); }, params);
  }
  bool AttentionBwdReadsOutput() const override { return cudnn_; }
  absl::Status Enqueue(const OpParams& params, Workspace, Stream&) override {
    UPIPE_CHECK(false) << NameOf(params) << " on a stand-in for a CUDA device";
    return absl::OkStatus();
  }

 private:
  // What is not listed keeps all it needs in registers and shared memory.
  template <typename Params>
  int64_t Bytes(const Params&) const {
    return 0;
  }
  int64_t Bytes(const MatmulParams&) const { return kMatmulBytes; }
  int64_t Bytes(const AttentionFwdParams& p) const {
    return UsesCudnn(p.q) ? CudnnForwardBytes(p) : 0;
  }
  int64_t Bytes(const AttentionBwdParams& p) const {
    return UsesCudnn(p.q) ? CudnnBackwardBytes(p) : 0;
  }
  int64_t Bytes(const RmsNormBwdParams& p) const {
    const int64_t columns = p.weight.shape[0];
    return RowPartials(p.x.num_elements() / columns, columns);
  }
  int64_t Bytes(const ColumnSumParams& p) const { return RowPartials(p.x.shape[0], p.x.shape[1]); }
  int64_t Bytes(const SumOfSquaresParams& p) const {
    return CeilDiv(p.x.shape[0], kSquaresBlock) * kF64Bytes;
  }
  int64_t Bytes(const CrossEntropyParams& p) const { return p.logits.shape[0] * kF64Bytes; }

  // It has no fp32 attention.
  bool UsesCudnn(const TensorView& q) const { return cudnn_ && q.dtype == DType::kBFloat16; }

  const bool cudnn_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<OpTable>> CreateCudaStandIn(const std::string& attention_kernel) {
  if (attention_kernel == kOwnAttention) return std::make_unique<CudaStandIn>(false);
  if (attention_kernel == kCudnnAttention) return std::make_unique<CudaStandIn>(true);
  return absl::InvalidArgumentError(absl::StrCat("unknown attention kernel \"", attention_kernel,
                                                 "\" of backend cuda; there are ", kOwnAttention,
                                                 " and ", kCudnnAttention));
}

}  // namespace upipe::kernels
