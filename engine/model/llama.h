// A decoder of the Llama family over one long sequence shared by the context ranks: hand-written
// forward and backward with activation checkpointing (of every stride-th layer the input is kept),
// loss and MLP tiled over tokens, weights gathered one unit ahead of their use. Logits [N, vocab]
// never exist. Where layer inputs, attention outputs and the hidden stream live is the memory
// policy's; results do not depend on it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/attention/head_chunk_attention.h"
#include "engine/model/mlp.h"
#include "engine/model/model_config.h"
#include "engine/model/position_ranges.h"
#include "engine/model/sharded_parameters.h"
#include "engine/token_tensor.h"

namespace upipe::model {

// This rank's tokens of one sequence, on the device.
struct Batch {
  kernels::TensorView tokens;  // [N] int32
  kernels::TensorView labels;  // [N] int32, already shifted; negative = no label
  attention::Sequence sequence;
  // [kNumPositionRanges, 2] fp64, accumulated: summed loss and labelled tokens of this rank's
  // positions in each range
  kernels::TensorView loss_and_count;
};

struct LlamaParams {
  ModelConfig config;
  const v1::HeadChunkSchedule* schedule = nullptr;  // borrowed
  parallel::TokenMap tokens;
  engine::MemoryPolicy policy;
};

class LlamaModel {
 public:
  LlamaModel(const engine::RankContext& context, const LlamaParams& params,
             ShardedParameters& parameters);

  // Forward, loss and backward of one sequence. Adds this rank's shard of the summed gradients to
  // the parameters' (d(sum of token losses); the division by the number of valid tokens is the
  // optimizer's).
  absl::Status ForwardBackward(const Batch& batch, int64_t step);

  // Forward and loss only. `logits`, when present, [N, vocab]: receives the logits of this rank's
  // tokens, fp32.
  absl::Status Evaluate(const Batch& batch, int64_t step, const kernels::TensorView& logits = {});

 private:
  // What the backward pass of a layer starts from.
  struct LayerInput {
    engine::TokenTensor x;  // [N, d], where layer inputs live; absent until it is rebuilt
    // Where the policy keeps it; with attention_output: host all of it is in host memory.
    std::optional<attention::AttentionOutput> attention;
  };
  // One block on its way forward.
  struct BlockRun {
    attention::Where where;
    const engine::TokenTensor& x;               // [N, d]
    const engine::TokenTensor& y;               // [N, d]; may be x
    const ParameterUnit& next;                  // the unit used after this block
    const engine::TokenTensor* copy = nullptr;  // receives x; on the host
    // Where to find the block's attention output and, when it is not there yet, to keep it.
    std::optional<attention::AttentionOutput>* attention = nullptr;
  };

  attention::AttentionWeights AttentionOf(const GatheredUnit& block) const;
  MlpWeights MlpOf(const GatheredUnit& block) const;
  absl::StatusOr<engine::TokenTensor> AllocateHidden(engine::Place place) const;  // [N, d]
  bool KeepsInput(int layer) const { return layer % params_.policy.checkpoint_stride == 0; }
  int FirstOfSegment(int layer) const { return layer - layer % params_.policy.checkpoint_stride; }
  std::optional<attention::AttentionOutput>* KeptAttention(LayerInput& input) const;
  const ParameterUnit& UnitAfterForward(int layer) const;
  const ParameterUnit* UnitAfterBackward(int layer) const;  // none after layer 0

  absl::StatusOr<engine::TokenTensor> Embed(const Batch& batch);
  // stream = the layer's output; keeps in `input` what the policy says.
  absl::Status ForwardLayer(const Batch& batch, const attention::Where& where,
                            engine::TokenTensor& stream, LayerInput& input);
  // Backward through the layers of a segment, whose first input is kept; dy -> d(input), in place.
  absl::Status BackwardSegment(const Batch& batch, int64_t step, absl::Span<LayerInput> segment,
                               int first_layer, const engine::TokenTensor& dy);
  absl::Status BlockForward(const Batch& batch, const BlockRun& run);
  absl::Status BlockBackward(const Batch& batch, const attention::Where& where, LayerInput input,
                             const engine::TokenTensor& dy);
  // Starts the copies of an attention output to host memory; the compute stream has not waited for
  // `done`. What is there already is not copied: host.out is then absent.
  struct LeavingAttention {
    attention::AttentionOutput host;
    kernels::Event done;
  };
  absl::StatusOr<LeavingAttention> LeaveForHost(const attention::AttentionOutput& output) const;
  // The way back: out where the hidden stream lives, lse on the device.
  absl::StatusOr<attention::AttentionOutput> FetchFromHost(attention::AttentionOutput kept) const;
  // Adds the loss; with write_gradient x becomes d(loss)/dx and the head's gradients are reduced.
  absl::Status Loss(const Batch& batch, const engine::TokenTensor& x, bool write_gradient,
                    const kernels::TensorView& logits_out);
  // Positions of one range: `tile.loss_and_count` is that range's [2].
  absl::Status LossTile(const Batch& tile, const kernels::TensorView& x, const GatheredUnit& head,
                        const GatheredUnit* gradient, const kernels::TensorView& logits_out);
  absl::Status EmbedBackward(const Batch& batch, const engine::TokenTensor& dx);

  const engine::RankContext& context_;
  LlamaParams params_;
  std::vector<kernels::PositionRun> runs_;  // of this rank's tokens
  ShardedParameters& parameters_;
  attention::HeadChunkAttention attention_;
};

}  // namespace upipe::model
