#include "engine/attention/stage_exchange.h"

#include <algorithm>
#include <vector>

#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::attention {

using engine::RankContext;
using engine::StageName;
using engine::TileAccess;
using engine::TileUse;
using engine::Timed;
using engine::TokenTensor;
using kernels::Buffer;
using kernels::DType;
using kernels::TensorView;

namespace {

constexpr DType kF32 = DType::kFloat32;

// Every head's rows as a block of their own; `heads` are HeadBlocks or rows of them.
void AddHeads(int peer, const TensorView& heads, std::vector<comm::Block>& blocks) {
  const int64_t bytes = heads.shape[0] * heads.shape[2] * SizeOf(heads.dtype);
  for (int64_t i = 0; i < heads.shape[1]; ++i) blocks.push_back({peer, heads.At(0, i), bytes});
}

// Among the Ulysses ranks; nothing to do for one.
absl::Status Exchange(const LayerCall& call, const Turn& turn, StageName name,
                      const comm::AllToAllVParams& exchange) {
  if (call.views.ulysses_ranks() == 1) return absl::OkStatus();
  const Timed timed(call.streams.side, name, turn.stage);
  return call.streams.side.comm().AllToAllV(exchange, call.streams.side.stream());
}

// The rank's tokens of a chunk, in one tile where no access is on the host.
engine::TileRange ChunkTokens(const LayerCall& call, int64_t chunk,
                              absl::Span<const TileAccess> accesses) {
  const bool on_host = std::any_of(accesses.begin(), accesses.end(),
                                   [](const TileAccess& a) { return a.tensor->on_host(); });
  const int64_t begin = call.views.FirstToken(chunk), tokens = call.views.piece_tokens();
  return {.begin = begin,
          .end = begin + tokens,
          .tile_rows = on_host ? std::min(kTokenTile, tokens) : tokens};
}

// Columns of `heads` query or K/V heads from `first_head` on.
TileAccess Columns(const LayerCall& call, const TokenTensor& tensor, TileUse use,
                   int64_t first_head, int64_t heads) {
  const int64_t dim = call.views.head_dim();
  return {.tensor = &tensor, .use = use, .first_column = first_head * dim, .columns = heads * dim};
}

// Ulysses ranks that have query heads at a stage.
std::vector<int> BusyRanks(const LayerCall& call, int stage) {
  std::vector<int> busy;
  for (int c = 0; c < call.views.ulysses_ranks(); ++c) {
    if (call.views.Work(stage, c).query_heads_size() > 0) busy.push_back(c);
  }
  return busy;
}

// Own tokens of a turn's heads, of the storage type, to the ranks that attend with them.
absl::Status ExchangeToHeads(const LayerCall& call, const Turn& turn, const Buffer& staging,
                             const Buffer& heads) {
  const LayerViews& views = call.views;
  const TensorView whole = views.StageHeads(heads, turn.stage, views.stored());
  const int64_t piece = views.piece_tokens();
  comm::AllToAllVParams exchange;
  for (int c = 0; c < views.ulysses_ranks(); ++c) {
    if (c == views.ulysses()) continue;
    AddHeads(views.UlyssesPeer(c), views.OwnTokens(turn.stage, c, staging, heads), exchange.sends);
    AddHeads(views.UlyssesPeer(c), whole.Rows(c * piece, piece), exchange.receives);
  }
  return Exchange(call, turn, StageName::kExchange, exchange);
}

}  // namespace

absl::Status SendQueries(const LayerCall& call, const Turn& turn, const Buffer& staging,
                         const Buffer& queries) {
  const LayerViews& views = call.views;
  const RankContext& side = call.streams.side;
  const Projection projection{
      .weight = call.weights.wq, .bias = call.weights.bq, .norm = call.weights.q_norm};
  const Timed projecting(side, StageName::kProjection, turn.stage);
  const int64_t first = views.FirstToken(turn.chunk);
  UPIPE_RETURN_IF_ERROR(ForNormalisedTiles(
      side, call.shared(), first, first + views.piece_tokens(),
      [&](int64_t begin, const TensorView& xn) -> absl::Status {
        for (int c : BusyRanks(call, turn.stage)) {
          const TensorView own = views.OwnTokens(turn.stage, c, staging, queries);
          UPIPE_RETURN_IF_ERROR(Project(side, call.shared(), xn, begin, projection,
                                        views.Work(turn.stage, c).query_heads(0),
                                        own.Rows(begin - first, xn.shape[0])));
        }
        return absl::OkStatus();
      }));
  return ExchangeToHeads(call, turn, staging, queries);
}

namespace {

// Keys or values of one chunk.
absl::Status FetchChunk(const LayerCall& call, const std::vector<parallel::Fetch>& fetches,
                        const Turn& turn, KvTensor tensor, const Buffer& staging,
                        const KvStore& store) {
  const LayerViews& views = call.views;
  const RankContext& side = call.streams.side;
  const AttentionWeights& w = call.weights;
  const Projection projection = tensor == KvTensor::kKeys
                                    ? Projection{.weight = w.wk, .bias = w.bk, .norm = w.k_norm}
                                    : Projection{.weight = w.wv, .bias = w.bv, .rotate = false};
  const auto own_tokens = [&](const parallel::Fetch& fetch) {
    return fetch.own ? views.OwnPiece(store.Landing(tensor, turn, fetch.kv_head))
                     : views.StagedHead(staging, fetch.staged_index);
  };
  const Timed projecting(side, StageName::kProjection, turn.stage);
  const int64_t first = views.FirstToken(turn.chunk), piece = views.piece_tokens();
  UPIPE_RETURN_IF_ERROR(ForNormalisedTiles(
      side, call.shared(), first, first + piece,
      [&](int64_t begin, const TensorView& xn) -> absl::Status {
        for (const parallel::Fetch& fetch : fetches) {
          UPIPE_RETURN_IF_ERROR(Project(side, call.shared(), xn, begin, projection, fetch.kv_head,
                                        own_tokens(fetch).Rows(begin - first, xn.shape[0])));
        }
        return absl::OkStatus();
      }));
  comm::AllToAllVParams exchange;
  for (int c = 0; c < views.ulysses_ranks(); ++c) {
    if (c == views.ulysses()) continue;
    const int peer = views.UlyssesPeer(c);
    for (int32_t head : views.Work(turn.stage, c).fetch()) {
      const auto fetch = std::find_if(fetches.begin(), fetches.end(),
                                      [&](const auto& f) { return f.kv_head == head; });
      AddHeads(peer, own_tokens(*fetch), exchange.sends);
    }
    for (const parallel::Fetch& fetch : fetches) {
      if (!fetch.own) continue;
      const TensorView whole = store.Landing(tensor, turn, fetch.kv_head);
      AddHeads(peer, whole.Rows(c * piece, piece), exchange.receives);
    }
  }
  return Exchange(call, turn, StageName::kExchange, exchange);
}

}  // namespace

absl::Status FetchKv(const LayerCall& call, int stage, const Buffer& staging, KvStore& store) {
  const auto fetches =
      parallel::FetchesOf(call.views.schedule().stages(stage), call.views.ulysses());
  if (fetches.empty()) return absl::OkStatus();
  for (int64_t chunk = 0; chunk < call.views.num_chunks(); ++chunk) {
    for (KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
      UPIPE_RETURN_IF_ERROR(FetchChunk(call, fetches, {stage, chunk}, tensor, staging, store));
    }
    UPIPE_RETURN_IF_ERROR(store.Landed({stage, chunk}));
  }
  return store.Fetched(stage);
}

absl::Status SendOutputGradient(const LayerCall& call, const Turn& turn, const TokenTensor& dh,
                                const TokenTensor& out, const OutputGradientBuffers& b) {
  const LayerViews& views = call.views;
  const RankContext& side = call.streams.side;
  const Timed projecting(side, StageName::kProjection, turn.stage);
  const int64_t piece = views.piece_tokens(), dim = views.head_dim();
  const TensorView whole = views.StageHeads(b.dout, turn.stage, views.stored());
  const int64_t own_heads = whole.shape[1];
  // [N/n, heads] of what goes to each Ulysses rank: the own one's at home.
  std::vector<TensorView> deltas(views.ulysses_ranks());
  float* staged = static_cast<float*>(b.delta_local.data());
  const auto home = [&](int c) {
    return static_cast<float*>(b.delta.data()) + c * piece * own_heads;
  };
  for (int c = 0; c < views.ulysses_ranks(); ++c) {
    const int64_t heads = views.Work(turn.stage, c).query_heads_size();
    const bool own = c == views.ulysses();
    deltas[c] = TensorView::Matrix(own ? home(c) : staged, kF32, piece, heads);
    if (!own) staged += piece * heads;
  }
  const std::vector<int> busy = BusyRanks(call, turn.stage);
  std::vector<TileAccess> accesses = {{.tensor = &dh, .columns = call.params.hidden_size}};
  for (int c : busy) {
    const auto& work = views.Work(turn.stage, c);
    accesses.push_back(
        Columns(call, out, TileUse::kRead, work.query_heads(0), work.query_heads_size()));
  }
  const int64_t first = views.FirstToken(turn.chunk);
  const auto form = [&](int64_t begin, int64_t rows,
                        absl::Span<const TensorView> tiles) -> absl::Status {
    for (size_t i = 0; i < busy.size(); ++i) {
      const auto& work = views.Work(turn.stage, busy[i]);
      const TensorView dout =
          views.OwnTokens(turn.stage, busy[i], b.staging, b.dout).Rows(begin - first, rows);
      for (int h = 0; h < work.query_heads_size(); ++h) {
        UPIPE_RETURN_IF_ERROR(side.Run(kernels::MatmulParams{
            .a = tiles[0],
            .b = TensorView::Matrix(call.weights.wo.At(0, work.query_heads(h) * dim),
                                    views.stored(), call.params.hidden_size, dim,
                                    views.schedule().num_heads() * dim),
            .c = HeadOf(dout, h)}));
      }
      UPIPE_RETURN_IF_ERROR(
          side.Run(kernels::RowDotParams{.a = dout,
                                         .b = HeadColumns(tiles[i + 1], dim),
                                         .out = deltas[busy[i]].Rows(begin - first, rows)}));
    }
    return absl::OkStatus();
  };
  UPIPE_RETURN_IF_ERROR(
      engine::ForEachTile(side, ChunkTokens(call, turn.chunk, accesses), accesses, form));
  comm::AllToAllVParams exchange;
  for (int c = 0; c < views.ulysses_ranks(); ++c) {
    if (c == views.ulysses()) continue;
    const int peer = views.UlyssesPeer(c);
    AddHeads(peer, views.OwnTokens(turn.stage, c, b.staging, b.dout), exchange.sends);
    AddHeads(peer, whole.Rows(c * piece, piece), exchange.receives);
    exchange.sends.push_back({peer, deltas[c].data, deltas[c].num_bytes()});
    exchange.receives.push_back({peer, home(c), piece * own_heads * SizeOf(kF32)});
  }
  return Exchange(call, turn, StageName::kExchange, exchange);
}

absl::Status ResendOutput(const LayerCall& call, const Turn& turn, const TokenTensor& columns,
                          const Buffer& staging, const Buffer& heads) {
  const LayerViews& views = call.views;
  const RankContext& side = call.streams.side;
  const Timed sending(side, StageName::kExchange, turn.stage);
  const int64_t first = views.FirstToken(turn.chunk);
  for (int c : BusyRanks(call, turn.stage)) {
    const auto& work = views.Work(turn.stage, c);
    const TensorView own = views.OwnTokens(turn.stage, c, staging, heads);
    const TileAccess access =
        Columns(call, columns, TileUse::kRead, work.query_heads(0), work.query_heads_size());
    UPIPE_RETURN_IF_ERROR(engine::ForEachTile(
        side, ChunkTokens(call, turn.chunk, {&access, 1}), {&access, 1},
        [&](int64_t begin, int64_t rows, absl::Span<const TensorView> tiles) {
          return side.Run(kernels::StridedCopyParams{.src = HeadColumns(tiles[0], views.head_dim()),
                                                     .dst = own.Rows(begin - first, rows)});
        }));
  }
  return ExchangeToHeads(call, turn, staging, heads);
}

absl::Status ReturnHeads(const LayerCall& call, const Turn& turn, const Buffer& heads,
                         const Buffer& staging, Returned what, const TokenTensor& columns) {
  const LayerViews& views = call.views;
  const RankContext& side = call.streams.side;
  const Timed returning(side, StageName::kReturn, turn.stage);
  const int64_t piece = views.piece_tokens();
  const TensorView whole = views.StageHeads(heads, turn.stage, views.stored());
  comm::AllToAllVParams exchange;
  for (int c = 0; c < views.ulysses_ranks(); ++c) {
    if (c == views.ulysses()) continue;
    AddHeads(views.UlyssesPeer(c), whole.Rows(c * piece, piece), exchange.sends);
    AddHeads(views.UlyssesPeer(c), views.OwnTokens(turn.stage, c, staging, heads),
             exchange.receives);
  }
  UPIPE_RETURN_IF_ERROR(Exchange(call, turn, StageName::kReturn, exchange));
  const int64_t first = views.FirstToken(turn.chunk);
  for (int c : BusyRanks(call, turn.stage)) {
    const auto& work = views.Work(turn.stage, c);
    const TensorView own = views.OwnTokens(turn.stage, c, staging, heads);
    const TileAccess access =
        Columns(call, columns, TileUse::kWrite, work.query_heads(0), work.query_heads_size());
    const auto place = [&](int64_t begin, int64_t rows,
                           absl::Span<const TensorView> tiles) -> absl::Status {
      const TensorView src = own.Rows(begin - first, rows);
      const TensorView dst = HeadColumns(tiles[0], views.head_dim());
      if (what == Returned::kOutput) {
        return side.Run(kernels::StridedCopyParams{.src = src, .dst = dst});
      }
      return side.Run(kernels::RopeParams{.src = src,
                                          .dst = dst,
                                          .positions = call.sequence.positions.Rows(begin, rows),
                                          .config = call.params.rope,
                                          .inverse = true});
    };
    UPIPE_RETURN_IF_ERROR(engine::ForEachTile(side, ChunkTokens(call, turn.chunk, {&access, 1}),
                                              {&access, 1}, place));
  }
  return absl::OkStatus();
}

namespace {

// One chunk's exchange: parts[i], [N/n, 1, D], receives the own tokens of releases[i].
absl::Status CollectReleases(const LayerCall& call, const std::vector<parallel::Release>& releases,
                             KvTensor gradient, const Turn& turn, const Buffer& staging,
                             KvStore& store, std::vector<TensorView>& parts) {
  const LayerViews& views = call.views;
  const int64_t piece = views.piece_tokens();
  comm::AllToAllVParams exchange;
  int64_t staged = 0;
  parts.clear();
  for (const parallel::Release& release : releases) {
    if (release.rank != views.ulysses()) {
      parts.push_back(views.StagedHead(staging, staged++));
      AddHeads(views.UlyssesPeer(release.rank), parts.back(), exchange.receives);
      continue;
    }
    UPIPE_ASSIGN_OR_RETURN(const TensorView whole, store.Released(gradient, turn, release.kv_head));
    parts.push_back(views.OwnPiece(whole));
    for (int c = 0; c < views.ulysses_ranks(); ++c) {
      if (c == views.ulysses()) continue;
      AddHeads(views.UlyssesPeer(c), whole.Rows(c * piece, piece), exchange.sends);
    }
  }
  return Exchange(call, turn, StageName::kReturn, exchange);
}

// Puts or adds one part into its columns; the last of a sum of parts rounds it.
absl::Status PlaceRelease(const LayerCall& call, const parallel::Release& release,
                          KvTensor gradient, int64_t chunk, const TensorView& part,
                          const HomeGradients& home) {
  const RankContext& side = call.streams.side;
  const int64_t dim = call.views.head_dim(), first = call.views.FirstToken(chunk);
  const bool keys = gradient == KvTensor::kKeyGradients;
  const TokenTensor& stored = keys ? home.dk : home.dv;
  const TokenTensor& sums = keys ? home.dk_sums : home.dv_sums;
  const bool apart = sums.present() && release.sum_slot != parallel::Release::kNoSum;
  const TileUse use = release.first ? TileUse::kWrite : TileUse::kReadWrite;
  std::vector<TileAccess> accesses = {apart ? Columns(call, sums, use, release.sum_slot, 1)
                                            : Columns(call, stored, use, release.kv_head, 1)};
  if (apart && release.last) {
    accesses.push_back(Columns(call, stored, TileUse::kWrite, release.kv_head, 1));
  }
  const auto add = [&](int64_t begin, int64_t rows, const TensorView& sum) {
    const TensorView src = part.Rows(begin - first, rows);
    if (!keys) {
      return side.Run(
          kernels::StridedCopyParams{.src = src, .dst = sum, .accumulate = !release.first});
    }
    return side.Run(kernels::RopeParams{.src = src,
                                        .dst = sum,
                                        .positions = call.sequence.positions.Rows(begin, rows),
                                        .config = call.params.rope,
                                        .inverse = true,
                                        .accumulate = !release.first});
  };
  return engine::ForEachTile(
      side, ChunkTokens(call, chunk, accesses), accesses,
      [&](int64_t begin, int64_t rows, absl::Span<const TensorView> tiles) -> absl::Status {
        const TensorView sum = HeadColumns(tiles[0], dim);
        UPIPE_RETURN_IF_ERROR(add(begin, rows, sum));
        if (tiles.size() == 1) return absl::OkStatus();
        return side.Run(kernels::StridedCopyParams{.src = sum, .dst = HeadColumns(tiles[1], dim)});
      });
}

}  // namespace

absl::Status ReturnKvGradients(const LayerCall& call, int stage, const Buffer& staging,
                               KvStore& store, const HomeGradients& home) {
  const auto releases = parallel::ReleasesOf(call.views.schedule(), stage);
  if (releases.empty()) return absl::OkStatus();
  const Timed returning(call.streams.side, StageName::kReturn, stage);
  std::vector<TensorView> parts;
  for (KvTensor gradient : {KvTensor::kKeyGradients, KvTensor::kValueGradients}) {
    UPIPE_RETURN_IF_ERROR(store.BeginRelease(stage, gradient));
    for (int64_t chunk = 0; chunk < call.views.num_chunks(); ++chunk) {
      UPIPE_RETURN_IF_ERROR(
          CollectReleases(call, releases, gradient, {stage, chunk}, staging, store, parts));
      for (size_t i = 0; i < releases.size(); ++i) {
        UPIPE_RETURN_IF_ERROR(PlaceRelease(call, releases[i], gradient, chunk, parts[i], home));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::attention
