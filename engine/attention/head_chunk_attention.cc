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

void* AddressOf(const Buffer& buffer, int64_t element, DType dtype) {
  return static_cast<char*>(buffer.data()) + element * SizeOf(dtype);
}

TensorView HeadsOf(void* data, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
  return TensorView::Tensor3(data, dtype, {tokens, heads, head_dim}, heads * head_dim, head_dim);
}

// The same, one head after the other: attention reads a head's rows as one block.
TensorView HeadBlocks(void* data, DType dtype, int64_t tokens, int64_t heads, int64_t head_dim) {
  return TensorView::Tensor3(data, dtype, {tokens, heads, head_dim}, head_dim, tokens * head_dim);
}

// [T, D] of one head.
TensorView Head(const TensorView& heads, int64_t index) {
  return TensorView::Matrix(heads.At(0, index), heads.dtype, heads.shape[0], heads.shape[2],
                            heads.stride[0]);
}

// Every head's rows as a block of their own; `heads` are HeadBlocks or rows of them.
void AddHeads(int peer, const TensorView& heads, std::vector<comm::Block>& blocks) {
  const int64_t bytes = heads.shape[0] * heads.shape[2] * SizeOf(heads.dtype);
  for (int64_t i = 0; i < heads.shape[1]; ++i) blocks.push_back({peer, heads.At(0, i), bytes});
}

// A [T, heads, D] view with heads side by side as the matrix [T, heads * D].
TensorView AsMatrix(const TensorView& heads) {
  return TensorView::Matrix(heads.data, heads.dtype, heads.shape[0],
                            heads.shape[1] * heads.shape[2], heads.stride[0]);
}

}  // namespace

// What makes queries, keys or values of the normalised stream. Views of the weights.
struct HeadChunkAttention::Projection {
  TensorView weight;   // [heads * D, d]
  TensorView bias;     // [heads * D] or absent
  TensorView norm;     // [D] or absent
  bool rotate = true;  // by RoPE
};

// The way back through a projection.
struct HeadChunkAttention::ProjectionBack {
  TensorView heads;  // [N, heads, D] gradient
  Projection forward;
  Projection gradients;  // views of the weights' gradients
};

struct HeadChunkAttention::ForwardBuffers {
  Buffer staging, q, k, v, o;
};

// Live over all stages of a backward pass beside dh, the attention output and the log-sum-exp.
struct HeadChunkAttention::BackwardBuffers {
  Buffer dkv;            // [N, 2, K, D], dk then dv of the own tokens
  Buffer q, k, v, dout;  // whole heads of the stage at this rank
  Buffer dq, dk, dv;     // the same, fp32
  Buffer staging;
  Buffer delta_local;  // [N, staged heads] fp32 to send
  Buffer delta;        // [Lp, stage heads] fp32 received
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
  returned_kv_type_ = parallel::SharesKvHeads(*params_.schedule) ? kF32 : stored();
}

const v1::HeadChunkSchedule::RankWork& HeadChunkAttention::Work(int stage, int rank) const {
  return params_.schedule->stages(stage).ranks(rank);
}

TensorView HeadChunkAttention::OwnTokens(int stage, int rank, const Buffer& staging,
                                         const Buffer& whole) const {
  const int64_t n = params_.tokens.tokens_per_rank;
  if (rank == context_.rank()) return StageHeads(whole, stage, stored()).Rows(rank * n, n);
  int64_t heads_before = 0;
  for (int r = 0; r < rank; ++r) {
    if (r != context_.rank()) heads_before += Work(stage, r).query_heads_size();
  }
  return HeadBlocks(AddressOf(staging, heads_before * n * params_.head_dim, stored()), stored(), n,
                    Work(stage, rank).query_heads_size(), params_.head_dim);
}

TensorView HeadChunkAttention::OwnTokensOfSlot(const Buffer& slots, int64_t slot) const {
  const int64_t n = params_.tokens.tokens_per_rank;
  return HeadsOf(KvSlots(slots, stored()).At(context_.rank() * n, slot), stored(), n, 1,
                 params_.head_dim);
}

TensorView HeadChunkAttention::StagedHead(const Buffer& staging, int64_t index) const {
  const int64_t n = params_.tokens.tokens_per_rank;
  return HeadsOf(AddressOf(staging, index * n * params_.head_dim, stored()), stored(), n, 1,
                 params_.head_dim);
}

TensorView HeadChunkAttention::HeadColumns(const Buffer& all_heads, DType dtype, int64_t first_head,
                                           int64_t heads, int64_t total_heads) const {
  const int64_t dim = params_.head_dim;
  return TensorView::Tensor3(AddressOf(all_heads, first_head * dim, dtype), dtype,
                             {params_.tokens.tokens_per_rank, heads, dim}, total_heads * dim, dim);
}

TensorView HeadChunkAttention::AllHeads(const AttentionOutput& output) const {
  const int64_t heads = params_.schedule->num_heads();
  return AsMatrix(HeadColumns(output.out, stored(), 0, heads, heads));
}

TensorView HeadChunkAttention::StageHeads(const Buffer& buffer, int stage, DType dtype) const {
  return HeadBlocks(buffer.data(), dtype, params_.tokens.padded_context,
                    Work(stage, context_.rank()).query_heads_size(), params_.head_dim);
}

TensorView HeadChunkAttention::KvSlots(const Buffer& buffer, DType dtype) const {
  const int64_t length = params_.tokens.padded_context;
  return TensorView::Tensor3(buffer.data(), dtype,
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
      Buffer buffer, context_.AllocateStored(MemoryTag::kWorkspace, tile * params_.hidden_size));
  for (int64_t begin = 0; begin < n; begin += tile) {
    const int64_t rows = std::min(tile, n - begin);
    const TensorView normalised =
        TensorView::Matrix(buffer.data(), stored(), rows, params_.hidden_size);
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RmsNormFwdParams{
        .x = x.Rows(begin, rows), .weight = norm, .y = normalised, .eps = params_.rms_norm_eps}));
    UPIPE_RETURN_IF_ERROR(body(begin, rows, normalised));
  }
  return absl::OkStatus();
}

absl::Status HeadChunkAttention::Project(const TensorView& xn, int64_t begin, const Projection& p,
                                         int64_t first_head, const TensorView& heads) {
  const int64_t rows = heads.shape[0], dim = params_.head_dim;
  const int64_t first = first_head * dim, columns = heads.shape[1] * dim;
  // One wide product; heads that lie one after the other get theirs as they are rotated.
  const bool apart = heads.shape[1] > 1 && heads.stride[1] != dim;
  Buffer scratch;
  TensorView product = heads;
  if (apart) {
    UPIPE_CHECK(p.rotate) << "only RoPE moves heads to their places";
    UPIPE_ASSIGN_OR_RETURN(scratch, context_.AllocateStored(MemoryTag::kWorkspace, rows * columns));
    product = HeadsOf(scratch.data(), stored(), rows, heads.shape[1], dim);
  }
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::MatmulParams{
      .a = xn,
      .b = p.weight.Rows(first, columns),
      .c = AsMatrix(product),
      .transpose_b = true,
      .bias = p.bias.present() ? p.bias.Rows(first, columns) : TensorView()}));
  if (p.norm.present()) {
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RmsNormFwdParams{
        .x = product, .weight = p.norm, .y = product, .eps = params_.rms_norm_eps}));
  }
  if (!p.rotate) return absl::OkStatus();
  return context_.Run(kernels::RopeParams{.src = product,
                                          .dst = heads,
                                          .positions = params_.positions.Rows(begin, rows),
                                          .config = params_.rope});
}

absl::Status HeadChunkAttention::ProjectQueries(int stage, const TensorView& x,
                                                const AttentionWeights& weights,
                                                const Buffer& staging, const Buffer& destination) {
  const Projection queries{.weight = weights.wq, .bias = weights.bq, .norm = weights.q_norm};
  return ForNormalisedTiles(
      x, weights.norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
        for (int c = 0; c < num_ranks(); ++c) {
          const auto& work = Work(stage, c);
          if (work.query_heads_size() == 0) continue;
          UPIPE_RETURN_IF_ERROR(
              Project(xn, begin, queries, work.query_heads(0),
                      OwnTokens(stage, c, staging, destination).Rows(begin, rows)));
        }
        return absl::OkStatus();
      });
}

absl::Status HeadChunkAttention::SendQueries(int stage, const Buffer& staging,
                                             const Buffer& destination) {
  comm::AllToAllVParams exchange;
  const TensorView received = StageHeads(destination, stage, stored());
  const int64_t n = params_.tokens.tokens_per_rank;
  for (int r = 0; r < num_ranks(); ++r) {
    if (r == context_.rank()) continue;
    AddHeads(r, OwnTokens(stage, r, staging, destination), exchange.sends);
    AddHeads(r, received.Rows(r * n, n), exchange.receives);
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::Status HeadChunkAttention::FetchOne(int stage, const TensorView& x, const TensorView& norm,
                                          const Projection& projection, const Buffer& staging,
                                          const Buffer& destination) {
  const auto fetches = parallel::FetchesOf(params_.schedule->stages(stage), context_.rank());
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t block_bytes = n * params_.head_dim * SizeOf(stored());
  const auto block = [&](const parallel::Fetch& fetch) {
    return fetch.own ? OwnTokensOfSlot(destination, fetch.slot)
                     : StagedHead(staging, fetch.staged_index);
  };
  UPIPE_RETURN_IF_ERROR(
      ForNormalisedTiles(x, norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
        for (const parallel::Fetch& fetch : fetches) {
          UPIPE_RETURN_IF_ERROR(
              Project(xn, begin, projection, fetch.kv_head, block(fetch).Rows(begin, rows)));
        }
        return absl::OkStatus();
      }));
  comm::AllToAllVParams exchange;
  for (int r = 0; r < num_ranks(); ++r) {
    if (r == context_.rank()) continue;
    for (int32_t head : Work(stage, r).fetch()) {
      const auto fetch = std::find_if(fetches.begin(), fetches.end(),
                                      [&](const auto& f) { return f.kv_head == head; });
      exchange.sends.push_back({r, block(*fetch).data, block_bytes});
    }
    for (const parallel::Fetch& fetch : fetches) {
      if (!fetch.own) continue;
      void* rows = KvSlots(destination, stored()).At(r * n, fetch.slot);
      exchange.receives.push_back({r, rows, block_bytes});
    }
  }
  return context_.comm().AllToAllV(exchange, context_.stream());
}

absl::Status HeadChunkAttention::FetchKv(int stage, const TensorView& x,
                                         const AttentionWeights& weights, const Buffer& staging,
                                         const Buffer& k, const Buffer& v) {
  if (parallel::FetchesOf(params_.schedule->stages(stage), context_.rank()).empty()) {
    return absl::OkStatus();
  }
  const Projection keys{.weight = weights.wk, .bias = weights.bk, .norm = weights.k_norm};
  const Projection values{.weight = weights.wv, .bias = weights.bv, .norm = {}, .rotate = false};
  UPIPE_RETURN_IF_ERROR(FetchOne(stage, x, weights.norm, keys, staging, k));
  return FetchOne(stage, x, weights.norm, values, staging, v);
}

absl::Status HeadChunkAttention::ReturnHeads(int stage, const Buffer& heads,
                                             const Buffer& staging) {
  comm::AllToAllVParams exchange;
  const TensorView whole = StageHeads(heads, stage, stored());
  const int64_t n = params_.tokens.tokens_per_rank;
  for (int r = 0; r < num_ranks(); ++r) {
    if (r == context_.rank()) continue;
    AddHeads(r, whole.Rows(r * n, n), exchange.sends);
    AddHeads(r, OwnTokens(stage, r, staging, heads), exchange.receives);
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
      output.out, context_.AllocateStored(MemoryTag::kAttnOut, n * schedule.num_heads() * dim));
  UPIPE_ASSIGN_OR_RETURN(
      output.lse, context_.AllocateFloats(MemoryTag::kAttnOut, extents.local_heads * length));
  ForwardBuffers b;
  const int64_t whole = length * extents.query_heads * dim;
  const int64_t resident = extents.kv_slots * length * dim;
  UPIPE_ASSIGN_OR_RETURN(
      b.staging, context_.AllocateStored(MemoryTag::kAttnExchange, n * extents.staged_heads * dim));
  UPIPE_ASSIGN_OR_RETURN(b.q, context_.AllocateStored(MemoryTag::kAttnQ, whole));
  UPIPE_ASSIGN_OR_RETURN(b.k, context_.AllocateStored(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.v, context_.AllocateStored(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.o, context_.AllocateStored(MemoryTag::kAttnOut, whole));
  for (int s = 0; s < schedule.stages_size(); ++s) {
    context_.Mark(where.step, where.pass, where.layer, s);
    UPIPE_RETURN_IF_ERROR(ProjectQueries(s, x, weights, b.staging, b.q));
    UPIPE_RETURN_IF_ERROR(SendQueries(s, b.staging, b.q));
    UPIPE_RETURN_IF_ERROR(FetchKv(s, x, weights, b.staging, b.k, b.v));
    const auto& own = Work(s, context_.rank());
    if (own.query_heads_size() > 0) {
      UPIPE_RETURN_IF_ERROR(
          context_.Run(kernels::AttentionFwdParams{.q = StageHeads(b.q, s, stored()),
                                                   .k = KvSlots(b.k, stored()),
                                                   .v = KvSlots(b.v, stored()),
                                                   .o = StageHeads(b.o, s, stored()),
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
          .src = OwnTokens(s, c, b.staging, b.o),
          .dst = HeadColumns(output.out, stored(), work.query_heads(0), work.query_heads_size(),
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
      b.dkv,
      context_.Allocate(MemoryTag::kAttnGrad, n * 2 * schedule.num_kv_heads() * params_.head_dim *
                                                  SizeOf(returned_kv_type_)));
  UPIPE_ASSIGN_OR_RETURN(b.q, context_.AllocateStored(MemoryTag::kAttnQ, whole));
  UPIPE_ASSIGN_OR_RETURN(b.k, context_.AllocateStored(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.v, context_.AllocateStored(MemoryTag::kAttnKv, resident));
  UPIPE_ASSIGN_OR_RETURN(b.dout, context_.AllocateStored(MemoryTag::kAttnGrad, whole));
  UPIPE_ASSIGN_OR_RETURN(b.dq, context_.AllocateFloats(MemoryTag::kAttnGrad, whole));
  UPIPE_ASSIGN_OR_RETURN(b.dk, context_.AllocateFloats(MemoryTag::kAttnGrad, resident));
  UPIPE_ASSIGN_OR_RETURN(b.dv, context_.AllocateFloats(MemoryTag::kAttnGrad, resident));
  UPIPE_ASSIGN_OR_RETURN(b.staging,
                         context_.AllocateStored(MemoryTag::kAttnExchange,
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
  const TensorView received = StageHeads(b.dout, stage, stored());
  const int64_t own_heads = received.shape[1];
  float* staged_delta = static_cast<float*>(b.delta_local.data());
  for (int c = 0; c < num_ranks(); ++c) {
    const bool own = c == context_.rank();
    const auto& work = Work(stage, c);
    const int64_t heads = work.query_heads_size();
    float* delta_home = static_cast<float*>(b.delta.data()) + c * n * own_heads;
    const TensorView dout = OwnTokens(stage, c, b.staging, b.dout);
    const TensorView delta = TensorView::Matrix(own ? delta_home : staged_delta, kF32, n, heads);
    if (heads > 0) {
      const int64_t first = work.query_heads(0);
      for (int64_t i = 0; i < heads; ++i) {
        UPIPE_RETURN_IF_ERROR(context_.Run(kernels::MatmulParams{
            .a = dh,
            .b = TensorView::Matrix(weights.wo.At(0, (first + i) * dim), stored(),
                                    params_.hidden_size, dim, num_heads * dim),
            .c = Head(dout, i)}));
      }
      UPIPE_RETURN_IF_ERROR(context_.Run(
          kernels::RowDotParams{.a = dout,
                                .b = HeadColumns(output.out, stored(), first, heads, num_heads),
                                .out = delta}));
    }
    if (own) continue;
    staged_delta += n * heads;
    AddHeads(c, dout, exchange.sends);
    AddHeads(c, received.Rows(c * n, n), exchange.receives);
    exchange.sends.push_back({c, delta.data, delta.num_bytes()});
    exchange.receives.push_back({c, delta_home, n * own_heads * SizeOf(kF32)});
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
  UPIPE_RETURN_IF_ERROR(ProjectQueries(stage, x, weights, b.staging, b.q));
  UPIPE_RETURN_IF_ERROR(SendQueries(stage, b.staging, b.q));
  UPIPE_RETURN_IF_ERROR(FetchKv(stage, x, weights, b.staging, b.k, b.v));
  for (int i = 0; i < own.kv_heads_size(); ++i) {
    if (std::find(own.fetch().begin(), own.fetch().end(), own.kv_heads(i)) == own.fetch().end())
      continue;
    for (const Buffer* gradient : {&b.dk, &b.dv}) {
      void* slot = KvSlots(*gradient, kF32).At(0, own.kv_slots(i));
      UPIPE_RETURN_IF_ERROR(
          context_.Fill(TensorView::Matrix(slot, kF32, length, params_.head_dim), 0));
    }
  }
  if (own.query_heads_size() > 0) {
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::AttentionBwdParams{
        .q = StageHeads(b.q, stage, stored()),
        .k = KvSlots(b.k, stored()),
        .v = KvSlots(b.v, stored()),
        .dout = StageHeads(b.dout, stage, stored()),
        .lse = LseRows(output.lse, stage),
        .delta = TensorView::Matrix(b.delta.data(), kF32, length, own.query_heads_size()),
        .dq = StageHeads(b.dq, stage, kF32),
        .dk = KvSlots(b.dk, kF32),
        .dv = KvSlots(b.dv, kF32),
        .kv_slot = SlotOfHead(stage),
        .queries = {0, length},
        .keys = {0, length},
        .mask = mask_,
        .scale = scale_}));
  }
  UPIPE_ASSIGN_OR_RETURN(const Buffer* dq, StoredQueryGradient(stage, b));
  UPIPE_RETURN_IF_ERROR(ReturnHeads(stage, *dq, b.staging));
  for (int c = 0; c < num_ranks(); ++c) {
    const auto& work = Work(stage, c);
    if (work.query_heads_size() == 0) continue;
    // The columns of these heads in the attention output are dead: dq takes their place.
    UPIPE_RETURN_IF_ERROR(context_.Run(
        kernels::RopeParams{.src = OwnTokens(stage, c, b.staging, *dq),
                            .dst = HeadColumns(output.out, stored(), work.query_heads(0),
                                               work.query_heads_size(), schedule.num_heads()),
                            .positions = params_.positions,
                            .config = params_.rope,
                            .inverse = true}));
  }
  UPIPE_RETURN_IF_ERROR(ReturnKvGradients(stage, b.dk, b.k, 0, /*rotate=*/true, b));
  return ReturnKvGradients(stage, b.dv, b.v, schedule.num_kv_heads(), /*rotate=*/false, b);
}

absl::StatusOr<const Buffer*> HeadChunkAttention::StoredQueryGradient(int stage,
                                                                      const BackwardBuffers& b) {
  if (stored() == kF32) return &b.dq;
  UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{
      .src = StageHeads(b.dq, stage, kF32), .dst = StageHeads(b.q, stage, stored())}));
  return &b.q;
}

absl::Status HeadChunkAttention::ReturnKvGradients(int stage, const Buffer& gradient,
                                                   const Buffer& dead, int64_t first_column,
                                                   bool rotate, const BackwardBuffers& b) {
  const auto releases = parallel::ReleasesOf(*params_.schedule, stage);
  if (releases.empty()) return absl::OkStatus();
  const int64_t n = params_.tokens.tokens_per_rank;
  const int64_t dim = params_.head_dim;
  const int64_t block_bytes = n * dim * SizeOf(stored());
  const bool narrow = stored() != kF32;
  const TensorView sent = KvSlots(narrow ? dead : gradient, stored());
  comm::AllToAllVParams exchange;
  std::vector<TensorView> parts;  // [N, 1, D] of each release
  int64_t staged = 0;
  for (const parallel::Release& release : releases) {
    if (release.rank != context_.rank()) {
      parts.push_back(StagedHead(b.staging, staged++));
      exchange.receives.push_back({release.rank, parts.back().data, block_bytes});
      continue;
    }
    if (narrow) {
      const auto whole = [&](const TensorView& slots) {
        return HeadsOf(slots.At(0, release.slot), slots.dtype, params_.tokens.padded_context, 1,
                       dim);
      };
      UPIPE_RETURN_IF_ERROR(context_.Run(
          kernels::StridedCopyParams{.src = whole(KvSlots(gradient, kF32)), .dst = whole(sent)}));
    }
    parts.push_back(OwnTokensOfSlot(narrow ? dead : gradient, release.slot));
    for (int r = 0; r < num_ranks(); ++r) {
      if (r == context_.rank()) continue;
      exchange.sends.push_back({r, sent.At(r * n, release.slot), block_bytes});
    }
  }
  UPIPE_RETURN_IF_ERROR(context_.comm().AllToAllV(exchange, context_.stream()));
  for (size_t i = 0; i < releases.size(); ++i) {
    const TensorView home =
        HeadColumns(b.dkv, returned_kv_type_, first_column + releases[i].kv_head, 1,
                    2 * params_.schedule->num_kv_heads());
    if (rotate) {
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RopeParams{.src = parts[i],
                                                             .dst = home,
                                                             .positions = params_.positions,
                                                             .config = params_.rope,
                                                             .inverse = true,
                                                             .accumulate = !releases[i].first}));
    } else {
      UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{
          .src = parts[i], .dst = home, .accumulate = !releases[i].first}));
    }
  }
  return absl::OkStatus();
}

absl::Status HeadChunkAttention::ProjectBack(const TensorView& x, const TensorView& dh,
                                             const AttentionWeights& w, const AttentionGradients& g,
                                             const AttentionOutput& output, const Buffer& dkv) {
  const int64_t num_heads = params_.schedule->num_heads();
  const int64_t kv_heads = params_.schedule->num_kv_heads();
  const int64_t d = params_.hidden_size;
  const DType kv_type = returned_kv_type_;
  // Gradients of what left Project, [N, heads, D], but for RoPE, which is undone already.
  const ProjectionBack projections[] = {
      {HeadColumns(output.out, stored(), 0, num_heads, num_heads),
       {.weight = w.wq, .bias = w.bq, .norm = w.q_norm, .rotate = false},
       {.weight = g.wq, .bias = g.bq, .norm = g.q_norm}},
      {HeadColumns(dkv, kv_type, 0, kv_heads, 2 * kv_heads),
       {.weight = w.wk, .bias = w.bk, .norm = w.k_norm, .rotate = false},
       {.weight = g.wk, .bias = g.bk, .norm = g.k_norm}},
      {HeadColumns(dkv, kv_type, kv_heads, kv_heads, 2 * kv_heads),
       {.weight = w.wv, .bias = w.bv, .norm = {}, .rotate = false},
       {.weight = g.wv, .bias = g.bv, .norm = {}}},
  };
  const int64_t tile = std::min(kTokenTile, params_.tokens.tokens_per_rank);
  UPIPE_ASSIGN_OR_RETURN(const Buffer dxn_buffer,
                         context_.AllocateFloats(MemoryTag::kWorkspace, tile * d));
  Buffer heads_buffer;  // of one projection before its norm, or rounded
  if (w.q_norm.present() || kv_type != stored()) {
    const int64_t heads = w.q_norm.present() ? num_heads : kv_heads;
    UPIPE_ASSIGN_OR_RETURN(heads_buffer, context_.AllocateStored(MemoryTag::kWorkspace,
                                                                 tile * heads * params_.head_dim));
  }
  return ForNormalisedTiles(x, w.norm, [&](int64_t begin, int64_t rows, const TensorView& xn) {
    const TensorView dxn = TensorView::Matrix(dxn_buffer.data(), kF32, rows, d);
    float beta = 0;
    for (const ProjectionBack& p : projections) {
      UPIPE_RETURN_IF_ERROR(ProjectTileBack(p, xn, begin, heads_buffer, beta, dxn));
      beta = 1;
    }
    return context_.Run(kernels::RmsNormBwdParams{.x = x.Rows(begin, rows),
                                                  .weight = w.norm,
                                                  .dy = dxn,
                                                  .dx = dh.Rows(begin, rows),
                                                  .dweight = g.norm,
                                                  .eps = params_.rms_norm_eps});
  });
}

absl::Status HeadChunkAttention::ProjectTileBack(const ProjectionBack& p, const TensorView& xn,
                                                 int64_t begin, const Buffer& scratch, float beta,
                                                 const TensorView& dxn) {
  const int64_t rows = xn.shape[0];
  TensorView gradient = p.heads.Rows(begin, rows);
  const TensorView tile =
      HeadsOf(scratch.data(), stored(), rows, gradient.shape[1], params_.head_dim);
  if (p.forward.norm.present()) {
    Projection before = p.forward;
    before.norm = {};
    UPIPE_RETURN_IF_ERROR(Project(xn, begin, before, 0, tile));
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::RmsNormBwdParams{.x = tile,
                                                                 .weight = p.forward.norm,
                                                                 .dy = gradient,
                                                                 .dx = tile,
                                                                 .dweight = p.gradients.norm,
                                                                 .eps = params_.rms_norm_eps,
                                                                 .accumulate = false}));
    gradient = tile;
  } else if (gradient.dtype != stored()) {
    UPIPE_RETURN_IF_ERROR(context_.Run(kernels::StridedCopyParams{.src = gradient, .dst = tile}));
    gradient = tile;
  }
  const TensorView columns = AsMatrix(gradient);
  if (p.gradients.bias.present()) {
    UPIPE_RETURN_IF_ERROR(
        context_.Run(kernels::ColumnSumParams{.x = columns, .out = p.gradients.bias}));
  }
  UPIPE_RETURN_IF_ERROR(context_.Run(
      kernels::MatmulParams{.a = columns, .b = p.forward.weight, .c = dxn, .beta = beta}));
  return context_.Run(kernels::MatmulParams{
      .a = columns, .b = xn, .c = p.gradients.weight, .transpose_a = true, .beta = 1});
}

}  // namespace upipe::attention
