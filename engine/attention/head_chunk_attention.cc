#include "engine/attention/head_chunk_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/status.h"

namespace upipe::attention {

using kernels::Buffer;
using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

constexpr DType kF32 = DType::kFloat32;

TensorView HeadsOf(void* data, int64_t tokens, int64_t heads, int64_t head_dim) {
  return TensorView::Tensor3(data, kF32, {tokens, heads, head_dim}, heads * head_dim, head_dim);
}

// A [T, heads, D] view with contiguous heads as the matrix [T, heads * D].
TensorView AsMatrix(const TensorView& heads) {
  return TensorView::Matrix(heads.data, kF32, heads.shape[0], heads.shape[1] * heads.shape[2],
                            heads.stride[0]);
}

}  // namespace

struct HeadChunkAttention::ForwardBuffers {
  Buffer staging, q, k, v, o;
};

// Live over all stages of a backward pass beside dh, the attention output and the log-sum-exp.
struct HeadChunkAttention::BackwardBuffers {
  Buffer dkv;                        // [N, 2, K, D], dk then dv of the own tokens
  Buffer q, k, v, dout, dq, dk, dv;  // whole heads of the stage at this rank
  Buffer staging;
  Buffer delta_local;  // [N, staged heads] to send
  Buffer delta;        // [Lp, stage heads] received
};

HeadChunkAttention::HeadChunkAttention(const engine::RankContext& context,
                                       const AttentionLayerParams& params)
    : context_(context),
      params_(params),
      mask_(params.tokens.Mask()),
      scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(params.head_dim)))) {
  UPIPE_CHECK(params_.schedule != nullptr &&
              params_.schedule->ulysses_ranks() == context.num_ranks())
      << "the schedule is not for " << context.num_ranks() << " ranks";
}

const v1::HeadChunkSchedule::RankWork& HeadChunkAttention::Work(int stage, int rank) const {
  return params_.schedule->stages(stage).ranks(rank);
}

TensorView HeadChunkAttention::StagedQueries(const Buffer& staging, int stage, int rank) const {
  int64_t heads_before = 0;
  for (int r = 0; r < rank; ++r) heads_before += Work(stage, r).query_heads_size();
  const int64_t n = params_.tokens.tokens_per_rank;
  return HeadsOf(static_cast<float*>(staging.data()) + heads_before * n * params_.head_dim, n,
                 Work(stage, rank).query_heads_size(), params_.head_dim);
}

TensorView HeadChunkAttention::HeadColumns(const Buffer& all_heads, int64_t first_head,
                                           int64_t heads, int64_t total_heads) const {
  const int64_t dim = params_.head_dim;
  return TensorView::Tensor3(static_cast<float*>(all_heads.data()) + first_head * dim, kF32,
                             {params_.tokens.tokens_per_rank, heads, dim}, total_heads * dim, dim);
}

TensorView HeadChunkAttention::StageHeads(const Buffer& buffer, int stage) const {
  return HeadsOf(buffer.data(), params_.tokens.padded_context,
                 Work(stage, context_.rank()).query_heads_size(), params_.head_dim);
}

TensorView HeadChunkAttention::KvSlots(const Buffer& buffer) const {
  const int64_t length = params_.tokens.padded_context;
  return TensorView::Tensor3(buffer.data(), kF32,
                             {length, params_.schedule->num_kv_slots(), params_.head_dim},
                             params_.head_dim, length * params_.head_dim);
}

TensorView HeadChunkAttention::LseRows(const Buffer& lse, int stage) const {
  int64_t rows_before = 0;
  for (int s = 0; s < stage; ++s) rows_before += Work(s, context_.rank()).query_heads_size();
  const int64_t length = params_.tokens.padded_context;
  return TensorView::Matrix(static_cast<float*>(lse.data()) + rows_before * length, kF32,
                            Work(stage, context_.rank()).query_heads_size(), length);
}

template <typename Body>
absl::Status HeadChunkAttention::ForNormalisedTiles(const TensorView& x, const TensorView& norm,
                                                    Body body) {
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t tile = std::min(kTokenTile, n);
  UPIPE_ASSIGN_OR_RETURN(
      Buffer buffer, context_.AllocateFloats(MemoryTag::kWorkspace, tile * params_.hidden_size));
  for (int64_t begin = 0; begin < n; begin += tile) {
    const int64_t rows = std::min(tile, n - begin);
    const TensorView normalised =
        TensorView::Matrix(buffer.data(), kF32, rows, params_.hidden_size);
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RmsNormFwdParams{
        .x = x.Rows(begin, rows), .weight = norm, .y = normalised, .eps = params_.rms_norm_eps}));
    UPIPE_RETURN_IF_ERROR(body(begin, rows, normalised));
  }
  return absl::OkStatus();
}

absl::Status HeadChunkAttention::ProjectQueries(int stage, const TensorView& x,
                                                const AttentionWeights& weights,
                                                const Buffer& staging) {
  return ForNormalisedTiles(
      x, weights.norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
        for (int c = 0; c < num_ranks(); ++c) {
          const auto& work = Work(stage, c);
          if (work.query_heads_size() == 0) continue;
          const TensorView q = StagedQueries(staging, stage, c).Rows(begin, rows);
          UPIPE_RETURN_IF_ERROR(context_.Run(kernels::MatmulParams{
              .a = xn,
              .b = weights.wq.Rows(work.query_heads(0) * params_.head_dim,
                                   work.query_heads_size() * params_.head_dim),
              .c = AsMatrix(q),
              .transpose_b = true}));
          UPIPE_RETURN_IF_ERROR(
              context_.Run(kernels::RopeParams{.src = q,
                                               .dst = q,
                                               .positions = params_.positions.Rows(begin, rows),
                                               .config = params_.rope}));
        }
        return absl::OkStatus();
      });
}

absl::Status HeadChunkAttention::SendQueries(int stage, const Buffer& staging,
                                             const Buffer& destination) {
  comm::AllToAllVParams exchange;
  const TensorView received = StageHeads(destination, stage);
  const int64_t n = params_.tokens.tokens_per_rank;
  for (int r = 0; r < num_ranks(); ++r) {
    const TensorView block = StagedQueries(staging, stage, r);
    exchange.sends.push_back({r, block.data, block.num_bytes()});
    const TensorView rows = received.Rows(r * n, n);
    exchange.receives.push_back({r, rows.data, rows.num_bytes()});
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::Status HeadChunkAttention::FetchOne(int stage, const TensorView& x, const TensorView& norm,
                                          const TensorView& weight, bool rotate,
                                          const Buffer& staging, const Buffer& destination) {
  const std::vector<int32_t> heads = parallel::FetchedHeads(params_.schedule->stages(stage));
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t dim = params_.head_dim;
  auto staged = [&](size_t i) {
    return HeadsOf(static_cast<float*>(staging.data()) + static_cast<int64_t>(i) * n * dim, n, 1,
                   dim);
  };
  UPIPE_RETURN_IF_ERROR(
      ForNormalisedTiles(x, norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
        for (size_t i = 0; i < heads.size(); ++i) {
          const TensorView block = staged(i).Rows(begin, rows);
          UPIPE_RETURN_IF_ERROR(
              context_.Run(kernels::MatmulParams{.a = xn,
                                                 .b = weight.Rows(heads[i] * dim, dim),
                                                 .c = AsMatrix(block),
                                                 .transpose_b = true}));
          if (!rotate) continue;
          UPIPE_RETURN_IF_ERROR(
              context_.Run(kernels::RopeParams{.src = block,
                                               .dst = block,
                                               .positions = params_.positions.Rows(begin, rows),
                                               .config = params_.rope}));
        }
        return absl::OkStatus();
      }));
  comm::AllToAllVParams exchange;
  for (int r = 0; r < num_ranks(); ++r) {
    for (int32_t head : Work(stage, r).fetch()) {
      const size_t i = std::lower_bound(heads.begin(), heads.end(), head) - heads.begin();
      exchange.sends.push_back({r, staged(i).data, n * dim * SizeOf(kF32)});
    }
    const auto& own = Work(stage, context_.rank());
    for (int32_t head : own.fetch()) {
      const auto index =
          std::find(own.kv_heads().begin(), own.kv_heads().end(), head) - own.kv_heads().begin();
      void* rows = KvSlots(destination).At(r * n, own.kv_slots(static_cast<int>(index)));
      exchange.receives.push_back({r, rows, n * dim * SizeOf(kF32)});
    }
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::Status HeadChunkAttention::FetchKv(int stage, const TensorView& x,
                                         const AttentionWeights& weights, const Buffer& staging,
                                         const Buffer& k, const Buffer& v) {
  if (parallel::FetchedHeads(params_.schedule->stages(stage)).empty()) return absl::OkStatus();
  UPIPE_RETURN_IF_ERROR(FetchOne(stage, x, weights.norm, weights.wk, /*rotate=*/true, staging, k));
  return FetchOne(stage, x, weights.norm, weights.wv, /*rotate=*/false, staging, v);
}

absl::Status HeadChunkAttention::ReturnHeads(int stage, const Buffer& heads,
                                             const Buffer& staging) {
  comm::AllToAllVParams exchange;
  const TensorView whole = StageHeads(heads, stage);
  const int64_t n = params_.tokens.tokens_per_rank;
  for (int r = 0; r < num_ranks(); ++r) {
    const TensorView rows = whole.Rows(r * n, n);
    exchange.sends.push_back({r, rows.data, rows.num_bytes()});
    const TensorView block = StagedQueries(staging, stage, r);
    exchange.receives.push_back({r, block.data, block.num_bytes()});
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::StatusOr<AttentionOutput> HeadChunkAttention::Forward(const TensorView& x,
                                                            const AttentionWeights& weights,
                                                            const Where& where) {
  const auto& schedule = *params_.schedule;
  const auto extents = parallel::ForwardExtents(schedule, context_.rank());
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t length = params_.tokens.padded_context;
  const int64_t dim = params_.head_dim;
  AttentionOutput output;
  UPIPE_ASSIGN_OR_RETURN(
      output.out, context_.AllocateFloats(MemoryTag::kAttnOut, n * schedule.num_heads() * dim));
  UPIPE_ASSIGN_OR_RETURN(
      output.lse, context_.AllocateFloats(MemoryTag::kAttnOut, extents.local_heads * length));
  ForwardBuffers b;
  const int64_t whole = length * extents.query_heads * dim;
  const int64_t resident = extents.kv_slots * length * dim;
  UPIPE_ASSIGN_OR_RETURN(
      b.staging, context_.AllocateFloats(MemoryTag::kAttnExchange, n * extents.staged_heads * dim));
  UPIPE_ASSIGN_OR_RETURN(b.q, context_.AllocateFloats(MemoryTag::kAttnQ, whole));
  UPIPE_ASSIGN_OR_RETURN(b.k, context_.AllocateFloats(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.v, context_.AllocateFloats(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.o, context_.AllocateFloats(MemoryTag::kAttnOut, whole));
  for (int s = 0; s < schedule.stages_size(); ++s) {
    context_.Mark(where.step, where.pass, where.layer, s);
    UPIPE_RETURN_IF_ERROR(ProjectQueries(s, x, weights, b.staging));
    UPIPE_RETURN_IF_ERROR(SendQueries(s, b.staging, b.q));
    UPIPE_RETURN_IF_ERROR(FetchKv(s, x, weights, b.staging, b.k, b.v));
    const auto& own = Work(s, context_.rank());
    if (own.query_heads_size() > 0) {
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::AttentionFwdParams{.q = StageHeads(b.q, s),
                                                                     .k = KvSlots(b.k),
                                                                     .v = KvSlots(b.v),
                                                                     .o = StageHeads(b.o, s),
                                                                     .lse = LseRows(output.lse, s),
                                                                     .kv_slot = SlotOfHead(s),
                                                                     .queries = {0, length},
                                                                     .keys = {0, length},
                                                                     .mask = mask_,
                                                                     .scale = scale_}));
    }
    UPIPE_RETURN_IF_ERROR(ReturnHeads(s, b.o, b.staging));
    for (int c = 0; c < num_ranks(); ++c) {
      const auto& work = Work(s, c);
      if (work.query_heads_size() == 0) continue;
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{
          .src = StagedQueries(b.staging, s, c),
          .dst = HeadColumns(output.out, work.query_heads(0), work.query_heads_size(),
                             schedule.num_heads())}));
    }
  }
  return output;
}

std::vector<int32_t> HeadChunkAttention::SlotOfHead(int stage) const {
  const auto& own = Work(stage, context_.rank());
  const int64_t group = params_.schedule->num_heads() / params_.schedule->num_kv_heads();
  std::vector<int32_t> slots;
  for (int32_t head : own.query_heads()) {
    const auto index = std::find(own.kv_heads().begin(), own.kv_heads().end(), head / group) -
                       own.kv_heads().begin();
    slots.push_back(own.kv_slots(static_cast<int>(index)));
  }
  return slots;
}

absl::StatusOr<HeadChunkAttention::BackwardBuffers> HeadChunkAttention::AllocateBackward() {
  const auto& schedule = *params_.schedule;
  const auto extents = parallel::BackwardExtents(schedule, context_.rank());
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t length = params_.tokens.padded_context;
  const int64_t whole = length * extents.query_heads * params_.head_dim;
  const int64_t resident = extents.kv_slots * length * params_.head_dim;
  BackwardBuffers b;
  UPIPE_ASSIGN_OR_RETURN(
      b.dkv, context_.AllocateFloats(MemoryTag::kAttnGrad,
                                     n * 2 * schedule.num_kv_heads() * params_.head_dim));
  UPIPE_ASSIGN_OR_RETURN(b.q, context_.AllocateFloats(MemoryTag::kAttnQ, whole));
  UPIPE_ASSIGN_OR_RETURN(b.k, context_.AllocateFloats(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.v, context_.AllocateFloats(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.dout, context_.AllocateFloats(MemoryTag::kAttnGrad, whole));
  UPIPE_ASSIGN_OR_RETURN(b.dq, context_.AllocateFloats(MemoryTag::kAttnGrad, whole));
  UPIPE_ASSIGN_OR_RETURN(b.dk, context_.AllocateFloats(MemoryTag::kAttnGrad, resident));
  UPIPE_ASSIGN_OR_RETURN(b.dv, context_.AllocateFloats(MemoryTag::kAttnGrad, resident));
  UPIPE_ASSIGN_OR_RETURN(b.staging,
                         context_.AllocateFloats(MemoryTag::kAttnExchange,
                                                 n * extents.staged_heads * params_.head_dim));
  UPIPE_ASSIGN_OR_RETURN(b.delta_local,
                         context_.AllocateFloats(MemoryTag::kAttnOut, n * extents.staged_heads));
  UPIPE_ASSIGN_OR_RETURN(
      b.delta, context_.AllocateFloats(MemoryTag::kAttnOut, length * extents.query_heads));
  return b;
}

absl::Status HeadChunkAttention::Backward(const TensorView& x, const TensorView& dh,
                                          const AttentionWeights& weights,
                                          const AttentionGradients& gradients,
                                          AttentionOutput output, const Where& where) {
  UPIPE_ASSIGN_OR_RETURN(BackwardBuffers buffers, AllocateBackward());
  for (int s = 0; s < params_.schedule->stages_size(); ++s) {
    context_.Mark(where.step, where.pass, where.layer, s);
    UPIPE_RETURN_IF_ERROR(BackwardStage(s, x, dh, weights, output, buffers));
  }
  const Buffer dkv = std::move(buffers.dkv);
  buffers = {};
  return ProjectBack(x, dh, weights, gradients, output, dkv);
}

absl::Status HeadChunkAttention::ProjectOutputGradient(int stage, const TensorView& dh,
                                                       const AttentionWeights& weights,
                                                       const AttentionOutput& output,
                                                       const BackwardBuffers& b) {
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t num_heads = params_.schedule->num_heads();
  const int64_t dim = params_.head_dim;
  comm::AllToAllVParams exchange;
  const TensorView received = StageHeads(b.dout, stage);
  const int64_t own_heads = received.shape[1];
  float* delta_block = static_cast<float*>(b.delta_local.data());
  for (int c = 0; c < num_ranks(); ++c) {
    const auto& work = Work(stage, c);
    const int64_t heads = work.query_heads_size();
    const TensorView dout = StagedQueries(b.staging, stage, c);
    const TensorView delta = TensorView::Matrix(delta_block, kF32, n, heads);
    if (heads > 0) {
      const int64_t first = work.query_heads(0);
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::MatmulParams{
          .a = dh,
          .b = TensorView::Matrix(weights.wo.At(0, first * dim), kF32, params_.hidden_size,
                                  heads * dim, num_heads * dim),
          .c = AsMatrix(dout)}));
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RowDotParams{
          .a = dout, .b = HeadColumns(output.out, first, heads, num_heads), .out = delta}));
    }
    exchange.sends.push_back({c, dout.data, dout.num_bytes()});
    exchange.sends.push_back({c, delta.data, delta.num_bytes()});
    exchange.receives.push_back({c, received.At(c * n), n * own_heads * dim * SizeOf(kF32)});
    exchange.receives.push_back(
        {c, static_cast<float*>(b.delta.data()) + c * n * own_heads, n * own_heads * SizeOf(kF32)});
    delta_block += n * heads;
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::Status HeadChunkAttention::BackwardStage(int stage, const TensorView& x, const TensorView& dh,
                                               const AttentionWeights& weights,
                                               const AttentionOutput& output,
                                               const BackwardBuffers& b) {
  const auto& schedule = *params_.schedule;
  const int64_t length = params_.tokens.padded_context;
  const auto& own = Work(stage, context_.rank());
  UPIPE_RETURN_IF_ERROR(ProjectOutputGradient(stage, dh, weights, output, b));
  UPIPE_RETURN_IF_ERROR(ProjectQueries(stage, x, weights, b.staging));
  UPIPE_RETURN_IF_ERROR(SendQueries(stage, b.staging, b.q));
  UPIPE_RETURN_IF_ERROR(FetchKv(stage, x, weights, b.staging, b.k, b.v));
  for (int i = 0; i < own.kv_heads_size(); ++i) {
    if (std::find(own.fetch().begin(), own.fetch().end(), own.kv_heads(i)) == own.fetch().end())
      continue;
    for (const Buffer* gradient : {&b.dk, &b.dv}) {
      void* slot = KvSlots(*gradient).At(0, own.kv_slots(i));
      UPIPE_RETURN_IF_ERROR(
          context_.Fill(TensorView::Matrix(slot, kF32, length, params_.head_dim), 0));
    }
  }
  if (own.query_heads_size() > 0) {
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::AttentionBwdParams{
        .q = StageHeads(b.q, stage),
        .k = KvSlots(b.k),
        .v = KvSlots(b.v),
        .dout = StageHeads(b.dout, stage),
        .lse = LseRows(output.lse, stage),
        .delta = TensorView::Matrix(b.delta.data(), kF32, length, own.query_heads_size()),
        .dq = StageHeads(b.dq, stage),
        .dk = KvSlots(b.dk),
        .dv = KvSlots(b.dv),
        .kv_slot = SlotOfHead(stage),
        .queries = {0, length},
        .keys = {0, length},
        .mask = mask_,
        .scale = scale_}));
  }
  UPIPE_RETURN_IF_ERROR(ReturnHeads(stage, b.dq, b.staging));
  for (int c = 0; c < num_ranks(); ++c) {
    const auto& work = Work(stage, c);
    if (work.query_heads_size() == 0) continue;
    // The columns of these heads in the attention output are dead: dq takes their place.
    UPIPE_RETURN_IF_ERROR(context_.Run(
        kernels::RopeParams{.src = StagedQueries(b.staging, stage, c),
                            .dst = HeadColumns(output.out, work.query_heads(0),
                                               work.query_heads_size(), schedule.num_heads()),
                            .positions = params_.positions,
                            .config = params_.rope,
                            .inverse = true}));
  }
  UPIPE_RETURN_IF_ERROR(ReturnKvGradients(stage, b.dk, 0, /*rotate=*/true, b));
  return ReturnKvGradients(stage, b.dv, schedule.num_kv_heads(), /*rotate=*/false, b);
}

absl::Status HeadChunkAttention::ReturnKvGradients(int stage, const Buffer& stage_gradient,
                                                   int64_t first_column, bool rotate,
                                                   const BackwardBuffers& b) {
  const auto releases = parallel::ReleasesOf(*params_.schedule, stage);
  if (releases.empty()) return absl::OkStatus();
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t dim = params_.head_dim;
  const int64_t block_bytes = n * dim * SizeOf(kF32);
  auto staged = [&](size_t i) {
    return HeadsOf(static_cast<float*>(b.staging.data()) + static_cast<int64_t>(i) * n * dim, n, 1,
                   dim);
  };
  comm::AllToAllVParams exchange;
  for (size_t i = 0; i < releases.size(); ++i) {
    exchange.receives.push_back({releases[i].rank, staged(i).data, block_bytes});
    if (releases[i].rank != context_.rank()) continue;
    for (int r = 0; r < num_ranks(); ++r) {
      exchange.sends.push_back(
          {r, KvSlots(stage_gradient).At(r * n, releases[i].slot), block_bytes});
    }
  }
  UPIPE_RETURN_IF_ERROR(context_.comm().AllToAllV(exchange, context_.stream()));
  for (size_t i = 0; i < releases.size(); ++i) {
    const TensorView home = HeadColumns(b.dkv, first_column + releases[i].kv_head, 1,
                                        2 * params_.schedule->num_kv_heads());
    if (rotate) {
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RopeParams{.src = staged(i),
                                                             .dst = home,
                                                             .positions = params_.positions,
                                                             .config = params_.rope,
                                                             .inverse = true,
                                                             .accumulate = !releases[i].first}));
    } else {
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{
          .src = staged(i), .dst = home, .accumulate = !releases[i].first}));
    }
  }
  return absl::OkStatus();
}

absl::Status HeadChunkAttention::ProjectBack(const TensorView& x, const TensorView& dh,
                                             const AttentionWeights& weights,
                                             const AttentionGradients& gradients,
                                             const AttentionOutput& output, const Buffer& dkv) {
  const int64_t num_heads = params_.schedule->num_heads();
  const int64_t kv_heads = params_.schedule->num_kv_heads();
  struct Projection {
    TensorView gradient;  // [N, heads * D] of the projected heads
    const TensorView& weight;
    const TensorView& weight_gradient;
  };
  const Projection projections[] = {
      {AsMatrix(HeadColumns(output.out, 0, num_heads, num_heads)), weights.wq, gradients.wq},
      {AsMatrix(HeadColumns(dkv, 0, kv_heads, 2 * kv_heads)), weights.wk, gradients.wk},
      {AsMatrix(HeadColumns(dkv, kv_heads, kv_heads, 2 * kv_heads)), weights.wv, gradients.wv},
  };
  const int64_t tile = std::min(kTokenTile, params_.tokens.tokens_per_rank);
  UPIPE_ASSIGN_OR_RETURN(Buffer dxn_buffer, context_.AllocateFloats(MemoryTag::kWorkspace,
                                                                    tile * params_.hidden_size));
  return ForNormalisedTiles(
      x, weights.norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
        const TensorView dxn =
            TensorView::Matrix(dxn_buffer.data(), kF32, rows, params_.hidden_size);
        float beta = 0;
        for (const Projection& p : projections) {
          const TensorView g = p.gradient.Rows(begin, rows);
          UPIPE_RETURN_IF_ERROR(
              context_.Run(kernels::MatmulParams{.a = g, .b = p.weight, .c = dxn, .beta = beta}));
          UPIPE_RETURN_IF_ERROR(context_.Run(kernels::MatmulParams{
              .a = g, .b = xn, .c = p.weight_gradient, .transpose_a = true, .beta = 1}));
          beta = 1;
        }
        return context_.Run(kernels::RmsNormBwdParams{.x = x.Rows(begin, rows),
                                                      .weight = weights.norm,
                                                      .dy = dxn,
                                                      .dx = dh.Rows(begin, rows),
                                                      .dweight = gradients.norm,
                                                      .eps = params_.rms_norm_eps});
      });
}

}  // namespace upipe::attention
