#include "engine/attention/layer_views.h"

#include <algorithm>

#include "common/check.h"

namespace upipe::attention {

using kernels::Buffer;
using kernels::DType;
using kernels::TensorView;

TensorView HeadBlocks(void* data, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
  return TensorView::Tensor3(data, dtype, {tokens, heads, head_dim}, head_dim, tokens * head_dim);
}

TensorView HeadColumns(const TensorView& matrix, int64_t head_dim) {
  return TensorView::Tensor3(matrix.data, matrix.dtype,
                             {matrix.shape[0], matrix.shape[1] / head_dim, head_dim},
                             matrix.stride[0], head_dim);
}

TensorView HeadOf(const TensorView& heads, int64_t index) {
  return TensorView::Matrix(heads.At(0, index), heads.dtype, heads.shape[0], heads.shape[2],
                            heads.stride[0]);
}

TensorView AsMatrix(const TensorView& heads) {
  return TensorView::Matrix(heads.data, heads.dtype, heads.shape[0],
                            heads.shape[1] * heads.shape[2], heads.stride[0]);
}

LayerViews::LayerViews(const engine::RankContext& context, const AttentionLayerParams& params)
    : params_(params), mesh_(context.mesh()), at_(context.at()), stored_(context.storage()) {
  UPIPE_CHECK(params.schedule != nullptr);
  const v1::HeadChunkSchedule& schedule = *params.schedule;
  UPIPE_CHECK(schedule.ulysses_ranks() == mesh_.ulysses_ranks &&
              schedule.ring_ranks() == mesh_.ring_ranks &&
              params.tokens.ulysses_ranks == mesh_.ulysses_ranks &&
              params.tokens.ring_ranks == mesh_.ring_ranks &&
              schedule.query_chunks() == params.tokens.query_chunks &&
              schedule.overlap() == params.policy.overlap)
      << "the schedule is for " << schedule.ulysses_ranks() << " x " << schedule.ring_ranks()
      << " ranks and " << schedule.query_chunks() << " chunks, the rank runs "
      << mesh_.ulysses_ranks << " x " << mesh_.ring_ranks << " and " << params.tokens.query_chunks;
}

int LayerViews::UlyssesPeer(int ulysses_rank) const {
  parallel::Coordinates peer = at_;
  peer.ulysses = ulysses_rank;
  return mesh_.RankAt(peer);
}

int LayerViews::RingPeer(int ring_rank) const {
  parallel::Coordinates peer = at_;
  peer.ring = ring_rank;
  return mesh_.RankAt(peer);
}

std::vector<Turn> LayerViews::Turns() const {
  std::vector<Turn> turns;
  for (int stage = 0; stage < schedule().stages_size(); ++stage) {
    for (int64_t chunk = 0; chunk < num_chunks(); ++chunk) turns.push_back({stage, chunk});
  }
  return turns;
}

const v1::HeadChunkSchedule::RankWork& LayerViews::Work(int stage, int ulysses_rank) const {
  return schedule().stages(stage).ranks(ulysses_rank);
}

int32_t LayerViews::KvHeadOf(int32_t query_head) const {
  return static_cast<int32_t>(query_head * schedule().num_kv_heads() / schedule().num_heads());
}

TensorView LayerViews::StageHeads(const Buffer& buffer, int stage, DType dtype) const {
  return HeadBlocks(buffer.data(), dtype, chunk_tokens(), OwnWork(stage).query_heads_size(),
                    head_dim());
}

TensorView LayerViews::OwnTokens(int stage, int rank, const Buffer& staging,
                                 const Buffer& whole) const {
  if (rank == ulysses()) return OwnPiece(StageHeads(whole, stage, stored_));
  int64_t heads_before = 0;
  for (int c = 0; c < rank; ++c) {
    if (c != ulysses()) heads_before += Work(stage, c).query_heads_size();
  }
  void* first = static_cast<char*>(staging.data()) +
                heads_before * piece_tokens() * head_dim() * SizeOf(stored_);
  return HeadBlocks(first, stored_, piece_tokens(), Work(stage, rank).query_heads_size(),
                    head_dim());
}

TensorView LayerViews::StagedHead(const Buffer& staging, int64_t index) const {
  void* first =
      static_cast<char*>(staging.data()) + index * piece_tokens() * head_dim() * SizeOf(stored_);
  return HeadBlocks(first, stored_, piece_tokens(), 1, head_dim());
}

TensorView LayerViews::OwnPiece(const TensorView& whole) const {
  return whole.Rows(ulysses() * piece_tokens(), piece_tokens());
}

TensorView LayerViews::LseOf(const Buffer& lse, const Turn& turn) const {
  int64_t rows_before = 0;
  for (int s = 0; s < turn.stage; ++s) rows_before += OwnWork(s).query_heads_size();
  float* first =
      static_cast<float*>(lse.data()) + rows_before * shard_tokens() + turn.chunk * chunk_tokens();
  return TensorView::Matrix(first, DType::kFloat32, OwnWork(turn.stage).query_heads_size(),
                            chunk_tokens(), shard_tokens());
}

std::vector<kernels::PositionRun> LayerViews::QueryRuns(int64_t chunk) const {
  return tokens().ShardRuns(ring(), chunk * chunk_tokens(), (chunk + 1) * chunk_tokens());
}

}  // namespace upipe::attention
