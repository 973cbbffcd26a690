// The geometry of one rank's attention layer: who its peers are, what a stage gives it to do, and
// where heads lie in the stage's buffers. Views only: nothing is allocated or enqueued here.
//
// A whole head of a query chunk is [M/n, D] at the rank that attends with it: the pieces of Ulysses
// ranks 0, 1, .. in position order. Heads of a buffer lie one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/attention/attention_layer.h"

namespace upipe::attention {

// [tokens, heads, D], one head after the other: attention reads a head's rows as one block.
kernels::TensorView HeadBlocks(void* data, kernels::DType dtype, int64_t tokens, int64_t heads,
                               int64_t head_dim);
// [tokens, heads, D], heads side by side in rows `row_stride` elements apart.
kernels::TensorView HeadColumns(const kernels::TensorView& matrix, int64_t head_dim);
// [tokens, D] of one head of either.
kernels::TensorView HeadOf(const kernels::TensorView& heads, int64_t index);
// A [tokens, heads, D] view with heads side by side as the matrix [tokens, heads * D].
kernels::TensorView AsMatrix(const kernels::TensorView& heads);

// A part of the schedule that is projected, exchanged and attended to at once: one query chunk of
// one stage.
struct Turn {
  int stage = 0;
  int64_t chunk = 0;
};

class LayerViews {
 public:
  LayerViews(const engine::RankContext& context, const AttentionLayerParams& params);

  const v1::HeadChunkSchedule& schedule() const { return *params_.schedule; }
  const parallel::TokenMap& tokens() const { return params_.tokens; }
  int64_t head_dim() const { return params_.head_dim; }
  int64_t num_chunks() const { return params_.tokens.query_chunks; }
  int64_t shard_tokens() const { return params_.tokens.shard_tokens(); }
  int64_t chunk_tokens() const { return params_.tokens.chunk_tokens(); }
  int64_t piece_tokens() const { return params_.tokens.piece_tokens(); }
  kernels::DType stored() const { return stored_; }

  int ulysses_ranks() const { return params_.tokens.ulysses_ranks; }
  int ring_ranks() const { return params_.tokens.ring_ranks; }
  int ulysses() const { return at_.ulysses; }  // of this rank
  int ring() const { return at_.ring; }
  int UlyssesPeer(int ulysses_rank) const;  // as the communicator numbers it
  int RingPeer(int ring_rank) const;

  std::vector<Turn> Turns() const;  // of the layer, in order
  const v1::HeadChunkSchedule::RankWork& Work(int stage, int ulysses_rank) const;
  const v1::HeadChunkSchedule::RankWork& OwnWork(int stage) const { return Work(stage, ulysses()); }
  int32_t KvHeadOf(int32_t query_head) const;  // the group's

  // Whole heads of this rank's queries of a chunk, [M/n, heads, D].
  kernels::TensorView StageHeads(const kernels::Buffer& buffer, int stage,
                                 kernels::DType dtype) const;
  // Where this rank's tokens of Ulysses rank `rank`'s query heads lie, [N/n, heads, D]: its own in
  // `whole` (whole heads), so that they need not travel; the others' in staging, lower ranks first.
  kernels::TensorView OwnTokens(int stage, int rank, const kernels::Buffer& staging,
                                const kernels::Buffer& whole) const;
  // The `index`th K/V head of staging, [N/n, 1, D].
  kernels::TensorView StagedHead(const kernels::Buffer& staging, int64_t index) const;
  // Rows of the own piece in a whole head [M/n, 1, D] of a chunk.
  kernels::TensorView OwnPiece(const kernels::TensorView& whole) const;
  // Log-sum-exp of the own heads of a turn, [heads, M/n], rows M apart.
  kernels::TensorView LseOf(const kernels::Buffer& lse, const Turn& turn) const;
  // First of the rank's tokens that belong to a chunk.
  int64_t FirstToken(int64_t chunk) const { return chunk * piece_tokens(); }
  std::vector<kernels::PositionRun> QueryRuns(int64_t chunk) const;

 private:
  AttentionLayerParams params_;
  parallel::Mesh mesh_;
  parallel::Coordinates at_;
  kernels::DType stored_;
};

}  // namespace upipe::attention
