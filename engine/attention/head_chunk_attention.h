// Executes a head-chunk schedule for one attention layer, forward and backward: project the stage's
// heads, exchange them so that each rank holds whole heads, attend, exchange back. One executor for
// every method: UPipe and Ulysses differ only in the schedule they bring (arXiv 2602.21196).
//
// Sizes below: N tokens of this rank, Lp padded context of all ranks, d hidden size, H query heads,
// K K/V heads, D head size. Tensors are of the context's storage type; log-sum-exp, delta, dq, dk
// and dv of a stage, and gradients of weights are fp32. Every call enqueues on the rank's compute
// stream and returns; buffers live until the stream passes.
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
  // Absent where the model has none.
  kernels::TensorView bq;              // [H * D]
  kernels::TensorView bk, bv;          // [K * D]
  kernels::TensorView q_norm, k_norm;  // [D]: RMSNorm of every query and key head before RoPE
};

// Same shapes, fp32, accumulated. wo is not touched here: its gradient belongs to the MLP-backward
// tile pass, which has dh and the attention output in hand.
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
  kernels::Buffer lse;  // [heads of this rank over all stages, Lp] fp32
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

  kernels::TensorView AllHeads(const AttentionOutput& output) const;  // [N, H * D]

 private:
  struct ForwardBuffers;
  struct BackwardBuffers;
  struct Projection;
  struct ProjectionBack;

  int num_ranks() const { return params_.tokens.ranks; }
  const v1::HeadChunkSchedule::RankWork& Work(int stage, int rank) const;
  kernels::DType stored() const { return context_.storage(); }
  // Where the own tokens of rank `rank`'s query heads lie, [N, heads, D], head after head: the own
  // rank's in `whole` ([heads, Lp, D]), so that they need not travel; the others' in staging, lower
  // ranks first.
  kernels::TensorView OwnTokens(int stage, int rank, const kernels::Buffer& staging,
                                const kernels::Buffer& whole) const;
  // The same of one K/V head: in slot `slot` of `slots`, or the `index`th of staging. [N, 1, D]
  kernels::TensorView OwnTokensOfSlot(const kernels::Buffer& slots, int64_t slot) const;
  kernels::TensorView StagedHead(const kernels::Buffer& staging, int64_t index) const;
  // [N, heads, D] of [N, total_heads, D].
  kernels::TensorView HeadColumns(const kernels::Buffer& all_heads, kernels::DType dtype,
                                  int64_t first_head, int64_t heads, int64_t total_heads) const;
  kernels::TensorView StageHeads(const kernels::Buffer& buffer, int stage,
                                 kernels::DType dtype) const;  // [Lp, heads, D], head after head
  kernels::TensorView KvSlots(const kernels::Buffer& buffer,
                              kernels::DType dtype) const;  // [Lp, slots, D]
  std::vector<int32_t> SlotOfHead(int stage) const;         // of each own query head
  kernels::TensorView LseRows(const kernels::Buffer& lse, int stage) const;  // [heads, Lp]

  // Runs body(tile_begin, tile_rows, normalised tile [rows, d]) over this rank's tokens.
  template <typename Body>
  absl::Status ForNormalisedTiles(const kernels::TensorView& x, const kernels::TensorView& norm,
                                  Body body);
  absl::Status ProjectQueries(int stage, const kernels::TensorView& x,
                              const AttentionWeights& weights, const kernels::Buffer& staging,
                              const kernels::Buffer& destination);
  absl::Status SendQueries(int stage, const kernels::Buffer& staging,
                           const kernels::Buffer& destination);
  absl::Status FetchKv(int stage, const kernels::TensorView& x, const AttentionWeights& weights,
                       const kernels::Buffer& staging, const kernels::Buffer& k,
                       const kernels::Buffer& v);
  absl::Status FetchOne(int stage, const kernels::TensorView& x, const kernels::TensorView& norm,
                        const Projection& projection, const kernels::Buffer& staging,
                        const kernels::Buffer& destination);
  // heads [rows, heads, D] = xn projected to as many heads from `first_head` on, normalised and
  // rotated as the projection says.
  absl::Status Project(const kernels::TensorView& xn, int64_t begin, const Projection& projection,
                       int64_t first_head, const kernels::TensorView& heads);
  absl::Status ReturnHeads(int stage, const kernels::Buffer& heads, const kernels::Buffer& staging);
  absl::Status ProjectOutputGradient(int stage, const kernels::TensorView& dh,
                                     const AttentionWeights& weights, const AttentionOutput& output,
                                     const BackwardBuffers& buffers);
  absl::Status BackwardStage(int stage, const kernels::TensorView& x, const kernels::TensorView& dh,
                             const AttentionWeights& weights, const AttentionOutput& output,
                             const BackwardBuffers& buffers);
  // The queries' gradient of the stage in the storage type; in bf16 it takes the place of the
  // queries.
  absl::StatusOr<const kernels::Buffer*> StoredQueryGradient(int stage, const BackwardBuffers& b);
  // Sends the released heads of `gradient` (in bf16 rounded into `dead`, whose slots nobody reads
  // any more) home to columns [first_column, first_column + K) of dkv.
  absl::Status ReturnKvGradients(int stage, const kernels::Buffer& gradient,
                                 const kernels::Buffer& dead, int64_t first_column, bool rotate,
                                 const BackwardBuffers& buffers);
  absl::Status ProjectBack(const kernels::TensorView& x, const kernels::TensorView& dh,
                           const AttentionWeights& weights, const AttentionGradients& gradients,
                           const AttentionOutput& output, const kernels::Buffer& dkv);
  // dxn [rows, d] fp32 = beta * dxn + the tile's gradient through one projection; adds to the
  // gradients of its weights. `scratch` holds the heads before their norm, or rounded.
  absl::Status ProjectTileBack(const ProjectionBack& projection, const kernels::TensorView& xn,
                               int64_t begin, const kernels::Buffer& scratch, float beta,
                               const kernels::TensorView& dxn);
  absl::StatusOr<BackwardBuffers> AllocateBackward();

  const engine::RankContext& context_;
  AttentionLayerParams params_;
  kernels::AttentionMask mask_;
  float scale_;
  // Of dk and dv at home: fp32 where a head's gradient is a sum of parts, else the storage type.
  kernels::DType returned_kv_type_ = kernels::DType::kFloat32;
};

}  // namespace upipe::attention
