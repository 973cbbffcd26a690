#include "engine/attention/head_chunk_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/status.h"
#include "engine/attention/kv_store.h"
#include "engine/attention/projection.h"
#include "engine/attention/stage_exchange.h"
#include "engine/step_clock.h"
#include "kernels/api/attention_pairs.h"

namespace upipe::attention {

using engine::RankContext;
using engine::StageName;
using engine::Timed;
using engine::TokenTensor;
using kernels::Buffer;
using kernels::DType;
using kernels::MemoryTag;
using kernels::PositionRun;
using kernels::TensorView;

namespace {

constexpr DType kF32 = DType::kFloat32;

// What a turn is given arrives in one set while the turn before works on the other.
constexpr int kMaxSets = 2;
using BufferSets = std::array<Buffer, kMaxSets>;

LayerStreams StreamsOf(const RankContext& context, bool overlap) {
  const engine::RankStreams& streams = context.streams();
  return {.compute = context,
          .side = overlap ? context.On(*streams.side) : context,
          .ring = overlap ? context.On(*streams.ring) : context};
}

// Live over all turns of a pass beside the hidden stream, the attention output and K/V. Forward
// has none from dout on.
struct TurnBuffers {
  Buffer staging;
  BufferSets q;        // whole heads of the turn at this rank
  Buffer result;       // the same: attention output (fp32 where parts are merged), or dq, fp32
  BufferSets dout;     // whole heads
  BufferSets out;      // whole heads of the attention output, where the kernel reads it
  BufferSets delta;    // [M/n, heads] fp32
  Buffer delta_local;  // [N/n, staged heads] fp32 to send
};

// One pass over the turns of a layer.
struct Pass {
  const LayerCall& call;
  KvStore& store;
  const TurnBuffers& buffers;
  DType result_type;
  const Buffer& lse;
  float scale;
  bool overlap;
};

// Calls body(query run's rows, key run's rows, first) for every pair of runs of which some query
// sees some key; `first` of its query run.
struct RunPair {
  PositionRun queries, keys;
  int64_t query_row = 0, key_row = 0;
  bool first = false;
};
template <typename Body>
absl::Status ForEachVisiblePair(const Pass& pass, const Turn& turn, Body body) {
  const LayerViews& views = pass.call.views;
  const std::vector<PositionRun> query_runs = views.QueryRuns(turn.chunk);
  std::vector<bool> started(query_runs.size(), false);
  const bool idle = views.OwnWork(turn.stage).query_heads_size() == 0;
  UPIPE_RETURN_IF_ERROR(
      pass.store.ForEachPart(turn, [&](const KvStore::Part& part) -> absl::Status {
        RunPair pair;
        for (size_t i = 0; !idle && i < query_runs.size(); ++i) {
          pair.queries = query_runs[i];
          pair.key_row = 0;
          for (const PositionRun& keys : part.runs) {
            pair.keys = keys;
            pair.first = !started[i];
            if (kernels::VisiblePairs(pass.call.sequence.mask, pair.queries, keys) > 0) {
              UPIPE_RETURN_IF_ERROR(body(part, pair));
              started[i] = true;
            }
            pair.key_row += keys.end - keys.begin;
          }
          pair.query_row += query_runs[i].end - query_runs[i].begin;
        }
        return absl::OkStatus();
      }));
  UPIPE_CHECK(idle || std::all_of(started.begin(), started.end(), [](bool s) { return s; }))
      << "a run of queries sees no key, not even its own";
  return absl::OkStatus();
}

int64_t Length(const PositionRun& run) { return run.end - run.begin; }

// Columns of [heads, M/n].
TensorView LseRows(const TensorView& lse, const RunPair& pair) {
  return TensorView::Matrix(lse.At(0, pair.query_row), kF32, lse.shape[0], Length(pair.queries),
                            lse.stride[0]);
}

TensorView QueryRows(const TensorView& heads, const RunPair& pair) {
  return heads.Rows(pair.query_row, Length(pair.queries));
}

TensorView KeyRows(const TensorView& heads, const RunPair& pair) {
  return heads.Rows(pair.key_row, Length(pair.keys));
}

absl::Status AttendForward(const Pass& pass, const Turn& turn, const Buffer& q) {
  const LayerViews& views = pass.call.views;
  const TensorView queries = views.StageHeads(q, turn.stage, views.stored());
  const TensorView outputs = views.StageHeads(pass.buffers.result, turn.stage, pass.result_type);
  const TensorView lse = views.LseOf(pass.lse, turn);
  return ForEachVisiblePair(pass, turn, [&](const KvStore::Part& part, const RunPair& pair) {
    return pass.call.streams.compute.Run(
        kernels::AttentionFwdParams{.q = QueryRows(queries, pair),
                                    .k = KeyRows(part.k, pair),
                                    .v = KeyRows(part.v, pair),
                                    .o = QueryRows(outputs, pair),
                                    .lse = LseRows(lse, pair),
                                    .kv_slot = part.places,
                                    .queries = pair.queries,
                                    .keys = pair.keys,
                                    .mask = pass.call.sequence.mask,
                                    .scale = pass.scale,
                                    .merge = !pair.first});
  });
}

absl::Status AttendBackward(const Pass& pass, const Turn& turn, int set) {
  const LayerViews& views = pass.call.views;
  const TurnBuffers& b = pass.buffers;
  const TensorView queries = views.StageHeads(b.q[set], turn.stage, views.stored());
  const TensorView douts = views.StageHeads(b.dout[set], turn.stage, views.stored());
  const TensorView outs =
      b.out[set] ? views.StageHeads(b.out[set], turn.stage, views.stored()) : TensorView();
  const TensorView dqs = views.StageHeads(b.result, turn.stage, kF32);
  const TensorView lse = views.LseOf(pass.lse, turn);
  const TensorView delta = TensorView::Matrix(b.delta[set].data(), kF32, views.chunk_tokens(),
                                              views.OwnWork(turn.stage).query_heads_size());
  return ForEachVisiblePair(pass, turn, [&](const KvStore::Part& part, const RunPair& pair) {
    return pass.call.streams.compute.Run(
        kernels::AttentionBwdParams{.q = QueryRows(queries, pair),
                                    .k = KeyRows(part.k, pair),
                                    .v = KeyRows(part.v, pair),
                                    .o = outs.present() ? QueryRows(outs, pair) : outs,
                                    .dout = QueryRows(douts, pair),
                                    .lse = LseRows(lse, pair),
                                    .delta = QueryRows(delta, pair),
                                    .dq = QueryRows(dqs, pair),
                                    .dk = KeyRows(part.dk, pair),
                                    .dv = KeyRows(part.dv, pair),
                                    .kv_slot = part.places,
                                    .grad_slot = part.gradient_places,
                                    .queries = pair.queries,
                                    .keys = pair.keys,
                                    .mask = pass.call.sequence.mask,
                                    .scale = pass.scale,
                                    .accumulate_dq = !pair.first});
  });
}

// The turn's results in the storage type, to travel from while the next turn fills `result`:
// rounded or, under overlap, moved into the place of the queries, which are dead.
absl::StatusOr<const Buffer*> Outgoing(const Pass& pass, const Turn& turn, const Buffer& q) {
  const LayerViews& views = pass.call.views;
  if (pass.result_type == views.stored() && !pass.overlap) return &pass.buffers.result;
  if (views.OwnWork(turn.stage).query_heads_size() > 0) {
    UPIPE_RETURN_IF_ERROR(pass.call.streams.compute.Run(kernels::StridedCopyParams{
        .src = views.StageHeads(pass.buffers.result, turn.stage, pass.result_type),
        .dst = views.StageHeads(q, turn.stage, views.stored())}));
  }
  return &q;
}

// Runs the turns of a layer: inputs on the side stream, attention on the compute stream, outputs on
// the side stream. Under overlap a turn's inputs are enqueued before the attention of the turn
// before, so that they arrive while it runs; else the two streams are one.
//   inputs(turn, set), attend(turn, set) -> what to send, outputs(turn, sent)
template <typename Inputs, typename Attend, typename Outputs>
absl::Status RunTurns(const LayerStreams& streams, const std::vector<Turn>& turns,
                      const std::function<void(int stage)>& mark, Inputs inputs, Attend attend,
                      Outputs outputs) {
  const bool overlap = &streams.side.stream() != &streams.compute.stream();
  kernels::Event ready;
  const auto bring = [&](size_t i) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(inputs(turns[i], overlap ? static_cast<int>(i % kMaxSets) : 0));
    if (overlap) ready = streams.side.stream().Record();
    return absl::OkStatus();
  };
  Order(streams.compute, streams.side);
  mark(turns[0].stage);
  if (overlap) UPIPE_RETURN_IF_ERROR(bring(0));
  for (size_t i = 0; i < turns.size(); ++i) {
    mark(turns[i].stage);
    const kernels::Event arrived = ready;
    if (!overlap) {
      UPIPE_RETURN_IF_ERROR(bring(i));
    } else if (i + 1 < turns.size()) {
      UPIPE_RETURN_IF_ERROR(bring(i + 1));
    }
    if (overlap) streams.compute.stream().Wait(arrived);
    UPIPE_ASSIGN_OR_RETURN(const Buffer* sent,
                           attend(turns[i], overlap ? static_cast<int>(i % kMaxSets) : 0));
    Order(streams.compute, streams.side);
    UPIPE_RETURN_IF_ERROR(outputs(turns[i], *sent));
  }
  Order(streams.side, streams.compute);
  return absl::OkStatus();
}

float ScaleOf(int64_t head_dim) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

absl::Status AllocateSets(const RankContext& context, int sets, MemoryTag tag, int64_t bytes,
                          BufferSets& buffers) {
  for (int set = 0; set < sets; ++set) {
    UPIPE_ASSIGN_OR_RETURN(buffers[set], context.Allocate(tag, bytes));
  }
  return absl::OkStatus();
}

int NumSets(const LayerViews& views, bool overlap) {
  return overlap && views.Turns().size() > 1 ? kMaxSets : 1;
}

}  // namespace

HeadChunkAttention::HeadChunkAttention(const RankContext& context,
                                       const AttentionLayerParams& params)
    : context_(context), params_(params), views_(context, params) {}

int64_t HeadChunkAttention::LogSumExpElements() const {
  return parallel::ForwardExtents(*params_.schedule, views_.ulysses()).local_heads *
         views_.shard_tokens();
}

absl::StatusOr<AttentionOutput> HeadChunkAttention::Forward(const TokenTensor& x,
                                                            const AttentionWeights& weights,
                                                            const Sequence& sequence,
                                                            const Where& where) const {
  const bool overlap = params_.policy.overlap;
  const LayerStreams streams = StreamsOf(context_, overlap);
  const auto extents = parallel::ForwardExtents(*params_.schedule, views_.ulysses());
  const int64_t dim = params_.head_dim, stored = SizeOf(views_.stored());
  const int64_t whole = views_.chunk_tokens() * extents.query_heads * dim;
  AttentionOutput output;
  UPIPE_ASSIGN_OR_RETURN(
      output.out, TokenTensor::Allocate(context_, params_.policy.hidden_stream, MemoryTag::kAttnOut,
                                        {.tokens = params_.tokens.tokens_per_rank,
                                         .columns = params_.schedule->num_heads() * dim,
                                         .dtype = views_.stored()}));
  UPIPE_ASSIGN_OR_RETURN(output.lse,
                         context_.AllocateFloats(MemoryTag::kAttnOut, LogSumExpElements()));
  TurnBuffers b;
  UPIPE_ASSIGN_OR_RETURN(
      b.staging, context_.AllocateStored(MemoryTag::kAttnExchange,
                                         views_.piece_tokens() * extents.staged_heads * dim));
  UPIPE_RETURN_IF_ERROR(
      AllocateSets(context_, NumSets(views_, overlap), MemoryTag::kAttnQ, whole * stored, b.q));
  UPIPE_ASSIGN_OR_RETURN(
      KvStore store,
      KvStore::Create(
          {.streams = streams, .views = views_, .policy = params_.policy, .mask = sequence.mask}));
  const DType result_type = store.has_parts() ? kF32 : views_.stored();
  UPIPE_ASSIGN_OR_RETURN(b.result,
                         context_.Allocate(MemoryTag::kAttnOut, whole * SizeOf(result_type)));
  const LayerCall call{streams, views_, params_, weights, x, sequence};
  const Pass pass{call, store, b, result_type, output.lse, ScaleOf(dim), overlap};
  UPIPE_RETURN_IF_ERROR(RunTurns(
      streams, views_.Turns(),
      [&](int stage) { context_.Mark(where.step, where.pass, where.layer, stage); },
      [&](const Turn& turn, int set) -> absl::Status {
        UPIPE_RETURN_IF_ERROR(SendQueries(call, turn, b.staging, b.q[set]));
        return turn.chunk == 0 ? FetchKv(call, turn.stage, b.staging, store) : absl::OkStatus();
      },
      [&](const Turn& turn, int set) -> absl::StatusOr<const Buffer*> {
        const Timed attending(context_, StageName::kAttention, turn.stage);
        UPIPE_RETURN_IF_ERROR(AttendForward(pass, turn, b.q[set]));
        return Outgoing(pass, turn, b.q[set]);
      },
      [&](const Turn& turn, const Buffer& sent) {
        return ReturnHeads(call, turn, sent, b.staging, Returned::kOutput, output.out);
      }));
  return output;
}

namespace {

absl::StatusOr<TurnBuffers> AllocateBackward(const RankContext& context, const LayerViews& views,
                                             bool overlap) {
  const auto extents = parallel::BackwardExtents(views.schedule(), views.ulysses());
  const int64_t dim = views.head_dim(), piece = views.piece_tokens();
  const int64_t whole = views.chunk_tokens() * extents.query_heads * dim;
  const int64_t stored = SizeOf(views.stored());
  const int sets = NumSets(views, overlap);
  TurnBuffers b;
  UPIPE_RETURN_IF_ERROR(AllocateSets(context, sets, MemoryTag::kAttnQ, whole * stored, b.q));
  UPIPE_RETURN_IF_ERROR(AllocateSets(context, sets, MemoryTag::kAttnGrad, whole * stored, b.dout));
  if (context.device().ops().AttentionBwdReadsOutput()) {
    UPIPE_RETURN_IF_ERROR(AllocateSets(context, sets, MemoryTag::kAttnOut, whole * stored, b.out));
  }
  UPIPE_ASSIGN_OR_RETURN(b.result, context.AllocateFloats(MemoryTag::kAttnGrad, whole));
  UPIPE_ASSIGN_OR_RETURN(b.staging, context.AllocateStored(MemoryTag::kAttnExchange,
                                                           piece * extents.staged_heads * dim));
  UPIPE_ASSIGN_OR_RETURN(b.delta_local,
                         context.AllocateFloats(MemoryTag::kAttnOut, piece * extents.staged_heads));
  UPIPE_RETURN_IF_ERROR(AllocateSets(context, sets, MemoryTag::kAttnOut,
                                     views.chunk_tokens() * extents.query_heads * SizeOf(kF32),
                                     b.delta));
  return b;
}

absl::StatusOr<HomeGradients> AllocateHome(const RankContext& context,
                                           const AttentionLayerParams& params) {
  const auto allocate = [&](int64_t heads, DType dtype) {
    return TokenTensor::Allocate(context, params.policy.hidden_stream, MemoryTag::kAttnGrad,
                                 {.tokens = params.tokens.tokens_per_rank,
                                  .columns = heads * params.head_dim,
                                  .dtype = dtype});
  };
  HomeGradients home;
  const int64_t kv_heads = params.schedule->num_kv_heads();
  UPIPE_ASSIGN_OR_RETURN(home.dk, allocate(kv_heads, context.storage()));
  UPIPE_ASSIGN_OR_RETURN(home.dv, allocate(kv_heads, context.storage()));
  const int sum_slots = parallel::NumSumSlots(*params.schedule);
  if (sum_slots == 0 || context.storage() == kF32) return home;
  UPIPE_ASSIGN_OR_RETURN(home.dk_sums, allocate(sum_slots, kF32));
  UPIPE_ASSIGN_OR_RETURN(home.dv_sums, allocate(sum_slots, kF32));
  return home;
}

// After the last stage, tile by tile: the gradients of queries, keys and values become those of
// their weights and of the normalised stream, and that one joins dh.
struct LayerGradients {
  const TokenTensor& dq;      // [N, H * D], rotation undone
  const HomeGradients& home;  // dk, dv
  const TokenTensor& dh;      // [N, d]
  const AttentionGradients& weights;
};
absl::Status ProjectBack(const RankContext& context, const LayerCall& call,
                         const LayerGradients& gradients) {
  const Timed projecting(context, StageName::kProjection, /*stage=*/-1);
  const AttentionWeights& w = call.weights;
  const AttentionGradients& g = gradients.weights;
  const v1::HeadChunkSchedule& schedule = call.views.schedule();
  const int64_t dim = call.params.head_dim, d = call.params.hidden_size;
  const int64_t query_columns = schedule.num_heads() * dim;
  const int64_t kv_columns = schedule.num_kv_heads() * dim;
  const ProjectionBack projections[] = {
      {{.weight = w.wq, .bias = w.bq, .norm = w.q_norm},
       {.weight = g.wq, .bias = g.bq, .norm = g.q_norm}},
      {{.weight = w.wk, .bias = w.bk, .norm = w.k_norm},
       {.weight = g.wk, .bias = g.bk, .norm = g.k_norm}},
      {{.weight = w.wv, .bias = w.bv}, {.weight = g.wv, .bias = g.bv}},
  };
  const engine::TileAccess accesses[] = {
      {.tensor = &gradients.dq, .columns = query_columns},
      {.tensor = &gradients.home.dk, .columns = kv_columns},
      {.tensor = &gradients.home.dv, .columns = kv_columns},
      {.tensor = &call.x, .columns = d},
      {.tensor = &gradients.dh, .use = engine::TileUse::kReadWrite, .columns = d},
  };
  const int64_t n = call.params.tokens.tokens_per_rank;
  const int64_t tile = std::min(kTokenTile, n);
  UPIPE_ASSIGN_OR_RETURN(const Buffer xn_buffer,
                         context.AllocateStored(MemoryTag::kWorkspace, tile * d));
  UPIPE_ASSIGN_OR_RETURN(const Buffer dxn_buffer,
                         context.AllocateFloats(MemoryTag::kWorkspace, tile * d));
  Buffer heads_buffer;  // of one projection before its norm
  if (w.q_norm.present()) {
    UPIPE_ASSIGN_OR_RETURN(heads_buffer,
                           context.AllocateStored(MemoryTag::kWorkspace, tile * query_columns));
  }
  const auto body = [&](int64_t begin, int64_t rows,
                        absl::Span<const TensorView> tiles) -> absl::Status {
    const TensorView &x = tiles[3], &dh = tiles[4];
    const TensorView xn = TensorView::Matrix(xn_buffer.data(), context.storage(), rows, d);
    const TensorView dxn = TensorView::Matrix(dxn_buffer.data(), kF32, rows, d);
    UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormFwdParams{
        .x = x, .weight = w.norm, .y = xn, .eps = call.params.rms_norm_eps}));
    for (int i = 0; i < 3; ++i) {
      UPIPE_RETURN_IF_ERROR(ProjectTileBack(context, call.shared(), projections[i],
                                            HeadColumns(tiles[i], dim), xn, begin, heads_buffer,
                                            i == 0 ? 0.0f : 1.0f, dxn));
    }
    return context.Run(kernels::RmsNormBwdParams{.x = x,
                                                 .weight = w.norm,
                                                 .dy = dxn,
                                                 .dx = dh,
                                                 .dweight = g.norm,
                                                 .eps = call.params.rms_norm_eps});
  };
  return engine::ForEachTile(context, {.begin = 0, .end = n, .tile_rows = tile}, accesses, body);
}

}  // namespace

absl::Status HeadChunkAttention::Backward(const TokenTensor& x, const TokenTensor& dh,
                                          const AttentionWeights& weights,
                                          const AttentionGradients& gradients,
                                          AttentionOutput output, const Sequence& sequence,
                                          const Where& where) const {
  const bool overlap = params_.policy.overlap;
  const LayerStreams streams = StreamsOf(context_, overlap);
  UPIPE_ASSIGN_OR_RETURN(HomeGradients home, AllocateHome(context_, params_));
  const LayerCall call{streams, views_, params_, weights, x, sequence};
  {
    UPIPE_ASSIGN_OR_RETURN(const TurnBuffers b, AllocateBackward(context_, views_, overlap));
    UPIPE_ASSIGN_OR_RETURN(KvStore store, KvStore::Create({.streams = streams,
                                                           .views = views_,
                                                           .policy = params_.policy,
                                                           .mask = sequence.mask,
                                                           .gradients = true}));
    const Pass pass{call, store, b, kF32, output.lse, ScaleOf(params_.head_dim), overlap};
    UPIPE_RETURN_IF_ERROR(RunTurns(
        streams, views_.Turns(),
        [&](int stage) { context_.Mark(where.step, where.pass, where.layer, stage); },
        [&](const Turn& turn, int set) -> absl::Status {
          UPIPE_RETURN_IF_ERROR(SendOutputGradient(
              call, turn, dh, output.out, {b.staging, b.dout[set], b.delta_local, b.delta[set]}));
          if (b.out[set]) {
            UPIPE_RETURN_IF_ERROR(ResendOutput(call, turn, output.out, b.staging, b.out[set]));
          }
          UPIPE_RETURN_IF_ERROR(SendQueries(call, turn, b.staging, b.q[set]));
          return turn.chunk == 0 ? FetchKv(call, turn.stage, b.staging, store) : absl::OkStatus();
        },
        [&](const Turn& turn, int set) -> absl::StatusOr<const Buffer*> {
          const Timed attending(context_, StageName::kAttention, turn.stage);
          UPIPE_RETURN_IF_ERROR(AttendBackward(pass, turn, set));
          return Outgoing(pass, turn, b.q[set]);
        },
        [&](const Turn& turn, const Buffer& sent) -> absl::Status {
          UPIPE_RETURN_IF_ERROR(
              ReturnHeads(call, turn, sent, b.staging, Returned::kQueryGradient, output.out));
          return turn.chunk + 1 == views_.num_chunks()
                     ? ReturnKvGradients(call, turn.stage, b.staging, store, home)
                     : absl::OkStatus();
        }));
  }
  output.lse.Free();
  home.dk_sums = {};
  home.dv_sums = {};
  return ProjectBack(context_, call, {output.out, home, dh, gradients});
}

}  // namespace upipe::attention
