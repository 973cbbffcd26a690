// A decoder of the Llama family over one long sequence shared by all ranks: hand-written forward
// and backward with full activation checkpointing (only layer inputs are kept), loss and MLP tiled
// over tokens, weights gathered one unit ahead of their use. Logits [N, vocab] never exist.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention/head_chunk_attention.h"
#include "engine/model/mlp.h"
#include "engine/model/model_config.h"
#include "engine/model/position_ranges.h"
#include "engine/model/sharded_parameters.h"

namespace upipe::model {

// This rank's tokens of one sequence, on the device.
struct Batch {
  kernels::TensorView tokens;  // [N] int32
  kernels::TensorView labels;  // [N] int32, already shifted; negative = no label
  // [kNumPositionRanges, 2] fp64, accumulated: summed loss and labelled tokens of this rank's
  // positions in each range
  kernels::TensorView loss_and_count;
};

struct LlamaParams {
  ModelConfig config;
  const v1::HeadChunkSchedule* schedule = nullptr;  // borrowed
  parallel::TokenMap tokens;
  kernels::TensorView positions;  // [N] int64
  // Attention outputs of all layers are kept from forward to backward instead of being computed
  // again.
  bool keep_attention_output = false;
};

class LlamaModel {
 public:
  LlamaModel(const engine::RankContext& context, const LlamaParams& params,
             ShardedParameters& parameters);

  // Forward, loss and backward of one sequence. Leaves this rank's shard of the summed gradients in
  // the parameters (d(sum of token losses); the division by the number of valid tokens is the
  // optimizer's).
  absl::Status ForwardBackward(const Batch& batch, int64_t step);

  // Forward and loss only. `logits`, when present, [N, vocab]: receives the logits of this rank's
  // tokens, fp32.
  absl::Status Evaluate(const Batch& batch, int64_t step, const kernels::TensorView& logits = {});

 private:
  attention::AttentionWeights AttentionOf(const GatheredUnit& block) const;
  MlpWeights MlpOf(const GatheredUnit& block) const;
  absl::StatusOr<kernels::Buffer> Embed(const Batch& batch);
  const ParameterUnit& UnitAfter(int layer) const;  // that the forward pass uses next
  // y [N, d] = the block's output for x; y may be x. Returns what attention left.
  absl::StatusOr<attention::AttentionOutput> BlockForward(
      int layer, const kernels::TensorView& x, const kernels::TensorView& y,
      const attention::HeadChunkAttention::Where& where);
  // What the backward pass of a layer starts from: its input, and its attention output where kept.
  struct LayerInput {
    kernels::Buffer x;  // [N, d]
    std::optional<attention::AttentionOutput> attention;
  };
  // dy -> d(input), in place.
  absl::Status BlockBackward(int layer, LayerInput input, const kernels::TensorView& dy,
                             int64_t step);
  // Adds the loss; with write_gradient x becomes d(loss)/dx and the head's gradients are reduced.
  absl::Status Loss(const Batch& batch, const kernels::TensorView& x, bool write_gradient,
                    const kernels::TensorView& logits_out);
  // Positions of one range: `tile.loss_and_count` is that range's [2].
  absl::Status LossTile(const Batch& tile, const kernels::TensorView& x, const GatheredUnit& head,
                        const GatheredUnit* gradient, const kernels::TensorView& logits_out);
  absl::Status EmbedBackward(const Batch& batch, const kernels::TensorView& dx);
  kernels::TensorView Hidden(const kernels::Buffer& buffer) const;  // [N, d]

  const engine::RankContext& context_;
  LlamaParams params_;
  ShardedParameters& parameters_;
  attention::HeadChunkAttention attention_;
};

}  // namespace upipe::model
