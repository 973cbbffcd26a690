#include "engine/model/mlp.h"

#include <algorithm>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"
#include "engine/attention/head_chunk_attention.h"
#include "engine/step_clock.h"

namespace upipe::model {

using attention::kTokenTile;
using engine::RankContext;
using engine::TileAccess;
using engine::TileUse;
using engine::TokenTensor;
using kernels::Buffer;
using kernels::DType;
using kernels::MatmulParams;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

// Scratch of one tile.
struct Tiles {
  Buffer wide;              // [rows, d] fp32: out wo^T, later the gradient of the normalised stream
  Buffer h, xn;             // [rows, d]
  Buffer gate, up, hidden;  // [rows, F]; h and hidden in backward only
};

absl::StatusOr<Tiles> AllocateTiles(const RankContext& context, int64_t rows, int64_t d, int64_t f,
                                    bool backward) {
  Tiles tiles;
  UPIPE_ASSIGN_OR_RETURN(tiles.wide, context.AllocateFloats(MemoryTag::kWorkspace, rows * d));
  UPIPE_ASSIGN_OR_RETURN(tiles.xn, context.AllocateStored(MemoryTag::kWorkspace, rows * d));
  UPIPE_ASSIGN_OR_RETURN(tiles.gate, context.AllocateStored(MemoryTag::kMlp, rows * f));
  UPIPE_ASSIGN_OR_RETURN(tiles.up, context.AllocateStored(MemoryTag::kMlp, rows * f));
  if (!backward) return tiles;
  UPIPE_ASSIGN_OR_RETURN(tiles.h, context.AllocateStored(MemoryTag::kWorkspace, rows * d));
  UPIPE_ASSIGN_OR_RETURN(tiles.hidden, context.AllocateStored(MemoryTag::kMlp, rows * f));
  return tiles;
}

// Rows of what attention hands over, in device memory.
struct AttentionTile {
  TensorView x, out, wo;
};

// h = x + out wo^T, rounded once; xn = norm(h); gate and up of xn.
struct Middle {
  TensorView wide, h, xn, gate, up;
};
absl::Status RunMiddle(const RankContext& context, const AttentionTile& attention,
                       const MlpWeights& weights, float eps, const Middle& m) {
  UPIPE_RETURN_IF_ERROR(context.Run(
      MatmulParams{.a = attention.out, .b = attention.wo, .c = m.wide, .transpose_b = true}));
  UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormFwdParams{.x = attention.x,
                                                              .weight = weights.norm,
                                                              .y = m.xn,
                                                              .residual = m.wide,
                                                              .sum = m.h,
                                                              .eps = eps}));
  UPIPE_RETURN_IF_ERROR(
      context.Run(MatmulParams{.a = m.xn, .b = weights.gate, .c = m.gate, .transpose_b = true}));
  return context.Run(MatmulParams{.a = m.xn, .b = weights.up, .c = m.up, .transpose_b = true});
}

absl::Status BackwardTile(const RankContext& context, const AttentionTile& attention,
                          const MlpWeights& w, float eps, const TensorView& dy,
                          const MlpGradients& g, const Tiles& tiles) {
  const int64_t rows = dy.shape[0];
  const int64_t d = dy.shape[1];
  const int64_t f = w.gate.shape[0];
  const DType stored = context.storage();
  const Middle m{.wide = TensorView::Matrix(tiles.wide.data(), DType::kFloat32, rows, d),
                 .h = TensorView::Matrix(tiles.h.data(), stored, rows, d),
                 .xn = TensorView::Matrix(tiles.xn.data(), stored, rows, d),
                 .gate = TensorView::Matrix(tiles.gate.data(), stored, rows, f),
                 .up = TensorView::Matrix(tiles.up.data(), stored, rows, f)};
  const TensorView hidden = TensorView::Matrix(tiles.hidden.data(), stored, rows, f);
  UPIPE_RETURN_IF_ERROR(RunMiddle(context, attention, w, eps, m));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = dy, .b = w.down, .c = hidden}));
  // d(hidden) becomes hidden, gate and up become their gradients.
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::SwiGluBwdParams{.dout = hidden, .gate = m.gate, .up = m.up}));
  const auto add_product = [&](const TensorView& left, const TensorView& right,
                               const TensorView& sum) {
    return context.Run(
        MatmulParams{.a = left, .b = right, .c = sum, .transpose_a = true, .beta = 1});
  };
  UPIPE_RETURN_IF_ERROR(add_product(dy, hidden, g.mlp.down));
  UPIPE_RETURN_IF_ERROR(add_product(m.gate, m.xn, g.mlp.gate));
  UPIPE_RETURN_IF_ERROR(add_product(m.up, m.xn, g.mlp.up));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = m.gate, .b = w.gate, .c = m.wide}));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = m.up, .b = w.up, .c = m.wide, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormBwdParams{
      .x = m.h, .weight = w.norm, .dy = m.wide, .dx = dy, .dweight = g.mlp.norm, .eps = eps}));
  // dy is dh now.
  return add_product(dy, attention.out, g.wo);
}

}  // namespace

absl::Status MlpForward(const RankContext& context, const AttentionSide& attention,
                        const MlpWeights& weights, float eps, const TokenTensor& y) {
  const engine::Timed timed_mlp(context, engine::StageName::kMlp);
  const int64_t n = y.view().shape[0];
  const int64_t d = y.view().shape[1];
  const int64_t f = weights.gate.shape[0];
  const int64_t tile = std::min(kTokenTile, n);
  const DType stored = context.storage();
  UPIPE_ASSIGN_OR_RETURN(const Tiles scratch,
                         AllocateTiles(context, tile, d, f, /*backward=*/false));
  const bool in_place = y.view().data == attention.x.view().data;
  std::vector<TileAccess> accesses = {
      AllColumns(attention.out, TileUse::kRead),
      AllColumns(attention.x, in_place ? TileUse::kReadWrite : TileUse::kRead)};
  if (!in_place) accesses.push_back(AllColumns(y, TileUse::kWrite));
  return ForEachTile(
      context, {.end = n, .tile_rows = tile}, accesses,
      [&](int64_t, int64_t rows, absl::Span<const TensorView> tiles) -> absl::Status {
        const Middle m{.wide = TensorView::Matrix(scratch.wide.data(), DType::kFloat32, rows, d),
                       .h = tiles.back(),
                       .xn = TensorView::Matrix(scratch.xn.data(), stored, rows, d),
                       .gate = TensorView::Matrix(scratch.gate.data(), stored, rows, f),
                       .up = TensorView::Matrix(scratch.up.data(), stored, rows, f)};
        UPIPE_RETURN_IF_ERROR(RunMiddle(
            context, {.x = tiles[1], .out = tiles[0], .wo = attention.wo}, weights, eps, m));
        UPIPE_RETURN_IF_ERROR(
            context.Run(kernels::SwiGluFwdParams{.gate = m.gate, .up = m.up, .out = m.gate}));
        return context.Run(
            MatmulParams{.a = m.gate, .b = weights.down, .c = m.h, .transpose_b = true, .beta = 1});
      });
}

absl::Status MlpBackward(const RankContext& context, const AttentionSide& attention,
                         const MlpWeights& weights, float eps, const TokenTensor& dy,
                         const MlpGradients& gradients) {
  const engine::Timed timed_mlp(context, engine::StageName::kMlp);
  const int64_t n = dy.view().shape[0];
  const int64_t tile = std::min(kTokenTile, n);
  UPIPE_ASSIGN_OR_RETURN(const Tiles scratch,
                         AllocateTiles(context, tile, dy.view().shape[1], weights.gate.shape[0],
                                       /*backward=*/true));
  const std::vector<TileAccess> accesses = {AllColumns(attention.out, TileUse::kRead),
                                            AllColumns(attention.x, TileUse::kRead),
                                            AllColumns(dy, TileUse::kReadWrite)};
  return ForEachTile(context, {.end = n, .tile_rows = tile}, accesses,
                     [&](int64_t, int64_t, absl::Span<const TensorView> tiles) {
                       return BackwardTile(context,
                                           {.x = tiles[1], .out = tiles[0], .wo = attention.wo},
                                           weights, eps, tiles[2], gradients, scratch);
                     });
}

}  // namespace upipe::model
