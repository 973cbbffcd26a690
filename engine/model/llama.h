// A Llama-3 decoder over one long sequence shared by all ranks: hand-written forward and backward
// with full activation checkpointing (only layer inputs are kept), loss and MLP tiled over tokens,
// weights gathered one unit at a time. Logits [N, vocab] never exist.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "engine/attention/head_chunk_attention.h"
#include "engine/model/mlp.h"
#include "engine/model/model_config.h"
#include "engine/model/sharded_parameters.h"

namespace upipe::model {

// This rank's tokens of one sequence, on the device.
struct Batch {
  kernels::TensorView tokens;  // [N] int32
  kernels::TensorView labels;  // [N] int32, already shifted; negative = no label
  kernels::TensorView
      loss_and_count;  // [2] fp64, accumulated: summed loss and labelled tokens of this rank
};

struct LlamaParams {
  ModelConfig config;
  const v1::HeadChunkSchedule* schedule = nullptr;  // borrowed
  parallel::TokenMap tokens;
  kernels::TensorView positions;  // [N] int64
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
  // tokens.
  absl::Status Evaluate(const Batch& batch, int64_t step, const kernels::TensorView& logits = {});

 private:
  attention::AttentionWeights AttentionOf(const GatheredUnit& block) const;
  MlpWeights MlpOf(const GatheredUnit& block) const;
  absl::StatusOr<kernels::Buffer> Embed(const Batch& batch);
  // x [N, d] -> the block's output, in place.
  absl::Status BlockForward(int layer, const kernels::TensorView& x,
                            const attention::HeadChunkAttention::Where& where);
  // dy -> d(input), in place.
  absl::Status BlockBackward(int layer, const kernels::TensorView& input,
                             const kernels::TensorView& dy, int64_t step);
  // Adds the loss; with write_gradient x becomes d(loss)/dx and the head's gradients are reduced.
  absl::Status Loss(const Batch& batch, const kernels::TensorView& x, bool write_gradient,
                    const kernels::TensorView& logits_out);
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
