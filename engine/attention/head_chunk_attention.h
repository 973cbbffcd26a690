// Executes a head-chunk schedule for one attention layer, forward and backward: project the stage's
// heads, exchange them so that each rank holds whole heads, attend, exchange back. One executor for
// every method: UPipe, Ulysses, Ring, the hybrids and FPDT differ only in the schedule, the token
// map and the memory policy they bring (arXiv 2602.21196; SCHEDULE in docs/architecture.md).
//
// Sizes below: N tokens of this rank, M tokens of a ring shard, d hidden size, H query heads, K K/V
// heads, D head size, n query chunks. Tensors are of the context's storage type; log-sum-exp,
// delta, dq, dk and dv of a stage, and gradients of weights are fp32. Every call enqueues on the
// rank's streams and returns; later work of the compute stream comes after it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/attention/attention_layer.h"
#include "engine/attention/layer_views.h"
#include "engine/token_tensor.h"

namespace upipe::attention {

// What Forward leaves and Backward needs.
struct AttentionOutput {
  engine::TokenTensor out;  // [N, H * D] where the hidden stream lives; Backward puts dq there
  kernels::Buffer lse;      // [heads of this rank over all stages, M] fp32, on the device
};

// Labels the position of a call.
struct Where {
  int64_t step = 0;
  StepPass pass = StepPass::kForward;
  int layer = 0;
};

class HeadChunkAttention {
 public:
  HeadChunkAttention(const engine::RankContext& context, const AttentionLayerParams& params);

  // x [N, d], wherever it lives, is only read: the normalised input is rebuilt tile by tile.
  absl::StatusOr<AttentionOutput> Forward(const engine::TokenTensor& x,
                                          const AttentionWeights& weights, const Sequence& sequence,
                                          const Where& where) const;

  // dh [N, d]: in, the gradient of the attention block's output stream; out, with the gradient
  // through attention and its norm added. `output` is consumed; its `out` may live in either place.
  absl::Status Backward(const engine::TokenTensor& x, const engine::TokenTensor& dh,
                        const AttentionWeights& weights, const AttentionGradients& gradients,
                        AttentionOutput output, const Sequence& sequence, const Where& where) const;

  // Elements of AttentionOutput.lse.
  int64_t LogSumExpElements() const;

 private:
  const engine::RankContext& context_;
  AttentionLayerParams params_;
  LayerViews views_;
};

}  // namespace upipe::attention
