// Executes a head-chunk schedule for one attention layer, forward and backward: project the stage's
// heads, exchange them so that each rank holds whole heads, attend, exchange back. One executor for
// every method: UPipe and Ulysses differ only in the schedule they bring (arXiv 2602.21196).
//
// Sizes below: N tokens of this rank, Lp padded context of all ranks, d hidden size, H query heads,
// K K/V heads, D head size. All fp32. Every call enqueues on the rank's compute stream and returns;
// buffers live until the stream passes.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/parallel/head_schedule.h"
#include "engine/parallel/token_map.h"
#include "engine/rank_context.h"

namespace upipe::attention {

// Rows of [tokens, d] worked on at a time where a full-length intermediate would cost memory.
inline constexpr int64_t kTokenTile = 512;

struct AttentionWeights {
  kernels::TensorView norm;  // [d]
  kernels::TensorView wq;    // [H * D, d]
  kernels::TensorView wk;    // [K * D, d]
  kernels::TensorView wv;    // [K * D, d]
  kernels::TensorView wo;    // [d, H * D]
};

// Same shapes, accumulated. wo is not touched here: its gradient belongs to the MLP-backward tile
// pass, which has dh and the attention output in hand.
using AttentionGradients = AttentionWeights;

struct AttentionLayerParams {
  const v1::HeadChunkSchedule* schedule = nullptr;  // borrowed
  parallel::TokenMap tokens;
  int64_t hidden_size = 0;
  int64_t head_dim = 0;
  float rms_norm_eps = 1e-5f;
  kernels::RopeConfig rope;
  kernels::TensorView positions;  // [N] int64, global
};

// What Forward leaves and Backward needs.
struct AttentionOutput {
  kernels::Buffer out;  // [N, H, D]; Backward overwrites it with dq, column by column
  kernels::Buffer lse;  // [heads of this rank over all stages, Lp]
};

class HeadChunkAttention {
 public:
  HeadChunkAttention(const engine::RankContext& context, const AttentionLayerParams& params);

  // Labels the position of a call.
  struct Where {
    int64_t step = 0;
    StepPass pass = StepPass::kForward;
    int layer = 0;
  };
  // x [N, d] is only read: the normalised input is rebuilt tile by tile.
  absl::StatusOr<AttentionOutput> Forward(const kernels::TensorView& x,
                                          const AttentionWeights& weights, const Where& where);

  // dh [N, d]: in, the gradient of the attention block's output stream; out, with the gradient
  // through attention and its norm added. `output` is consumed.
  absl::Status Backward(const kernels::TensorView& x, const kernels::TensorView& dh,
                        const AttentionWeights& weights, const AttentionGradients& gradients,
                        AttentionOutput output, const Where& where);

 private:
  struct ForwardBuffers;
  struct BackwardBuffers;

  int num_ranks() const { return params_.tokens.ranks; }
  const v1::HeadChunkSchedule::RankWork& Work(int stage, int rank) const;
  // [N, heads of `rank` at `stage`, D] inside staging, blocks of lower ranks first.
  kernels::TensorView StagedQueries(const kernels::Buffer& staging, int stage, int rank) const;
  kernels::TensorView HeadColumns(const kernels::Buffer& all_heads, int64_t first_head,
                                  int64_t heads, int64_t total_heads) const;
  kernels::TensorView StageHeads(const kernels::Buffer& buffer, int stage) const;  // [Lp, heads, D]
  kernels::TensorView KvSlots(const kernels::Buffer& buffer) const;                // [Lp, slots, D]
  std::vector<int32_t> SlotOfHead(int stage) const;  // of each own query head
  kernels::TensorView LseRows(const kernels::Buffer& lse, int stage) const;  // [heads, Lp]

  // Runs body(tile_begin, tile_rows, normalised tile [rows, d]) over this rank's tokens.
  template <typename Body>
  absl::Status ForNormalisedTiles(const kernels::TensorView& x, const kernels::TensorView& norm,
                                  Body body);
  absl::Status ProjectQueries(int stage, const kernels::TensorView& x,
                              const AttentionWeights& weights, const kernels::Buffer& staging);
  absl::Status SendQueries(int stage, const kernels::Buffer& staging,
                           const kernels::Buffer& destination);
  absl::Status FetchKv(int stage, const kernels::TensorView& x, const AttentionWeights& weights,
                       const kernels::Buffer& staging, const kernels::Buffer& k,
                       const kernels::Buffer& v);
  absl::Status FetchOne(int stage, const kernels::TensorView& x, const kernels::TensorView& norm,
                        const kernels::TensorView& weight, bool rotate,
                        const kernels::Buffer& staging, const kernels::Buffer& destination);
  absl::Status ReturnHeads(int stage, const kernels::Buffer& heads, const kernels::Buffer& staging);
  absl::Status ProjectOutputGradient(int stage, const kernels::TensorView& dh,
                                     const AttentionWeights& weights, const AttentionOutput& output,
                                     const BackwardBuffers& buffers);
  absl::Status BackwardStage(int stage, const kernels::TensorView& x, const kernels::TensorView& dh,
                             const AttentionWeights& weights, const AttentionOutput& output,
                             const BackwardBuffers& buffers);
  absl::Status ReturnKvGradients(int stage, const kernels::Buffer& stage_gradient,
                                 int64_t first_column, bool rotate, const BackwardBuffers& buffers);
  absl::Status ProjectBack(const kernels::TensorView& x, const kernels::TensorView& dh,
                           const AttentionWeights& weights, const AttentionGradients& gradients,
                           const AttentionOutput& output, const kernels::Buffer& dkv);
  absl::StatusOr<BackwardBuffers> AllocateBackward();

  const engine::RankContext& context_;
  AttentionLayerParams params_;
  kernels::AttentionMask mask_;
  float scale_;
};

}  // namespace upipe::attention
