#include "engine/attention/projection.h"

#include <algorithm>

#include "common/check.h"
#include "common/status.h"
#include "engine/attention/layer_views.h"

namespace upipe::attention {

using engine::RankContext;
using kernels::Buffer;
using kernels::MemoryTag;
using kernels::TensorView;

absl::Status ForNormalisedTiles(
    const RankContext& context, const ProjectionShared& shared, int64_t begin, int64_t end,
    const std::function<absl::Status(int64_t begin, const TensorView& xn)>& body) {
  const int64_t d = shared.params.hidden_size;
  const int64_t tile = std::min(kTokenTile, end - begin);
  UPIPE_ASSIGN_OR_RETURN(const Buffer buffer,
                         context.AllocateStored(MemoryTag::kWorkspace, tile * d));
  const engine::TileAccess x{.tensor = &shared.x, .columns = d};
  return engine::ForEachTile(
      context, {.begin = begin, .end = end, .tile_rows = tile}, {&x, 1},
      [&](int64_t first, int64_t rows, absl::Span<const TensorView> tiles) -> absl::Status {
        const TensorView xn = TensorView::Matrix(buffer.data(), context.storage(), rows, d);
        UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormFwdParams{
            .x = tiles[0], .weight = shared.norm, .y = xn, .eps = shared.params.rms_norm_eps}));
        return body(first, xn);
      });
}

absl::Status Project(const RankContext& context, const ProjectionShared& shared,
                     const TensorView& xn, int64_t begin, const Projection& p, int64_t first_head,
                     const TensorView& heads) {
  const int64_t rows = heads.shape[0], dim = shared.params.head_dim;
  const int64_t first = first_head * dim, columns = heads.shape[1] * dim;
  // One wide product; heads that lie one after the other get theirs as they are rotated.
  const bool apart = heads.shape[1] > 1 && heads.stride[1] != dim;
  Buffer scratch;
  TensorView product = heads;
  if (apart) {
    UPIPE_CHECK(p.rotate) << "only RoPE moves heads to their places";
    UPIPE_ASSIGN_OR_RETURN(scratch, context.AllocateStored(MemoryTag::kWorkspace, rows * columns));
    product =
        HeadColumns(TensorView::Matrix(scratch.data(), context.storage(), rows, columns), dim);
  }
  UPIPE_RETURN_IF_ERROR(context.Run(kernels::MatmulParams{
      .a = xn,
      .b = p.weight.Rows(first, columns),
      .c = AsMatrix(product),
      .transpose_b = true,
      .bias = p.bias.present() ? p.bias.Rows(first, columns) : TensorView()}));
  if (p.norm.present()) {
    UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormFwdParams{
        .x = product, .weight = p.norm, .y = product, .eps = shared.params.rms_norm_eps}));
  }
  if (!p.rotate) return absl::OkStatus();
  return context.Run(kernels::RopeParams{.src = product,
                                         .dst = heads,
                                         .positions = shared.positions.Rows(begin, rows),
                                         .config = shared.params.rope});
}

absl::Status ProjectTileBack(const RankContext& context, const ProjectionShared& shared,
                             const ProjectionBack& back, const TensorView& heads,
                             const TensorView& xn, int64_t begin, const Buffer& scratch, float beta,
                             const TensorView& dxn) {
  const int64_t rows = xn.shape[0], dim = shared.params.head_dim;
  TensorView gradient = heads;
  if (back.forward.norm.present()) {
    const TensorView tile = HeadColumns(
        TensorView::Matrix(scratch.data(), context.storage(), rows, heads.shape[1] * dim), dim);
    Projection before = back.forward;
    before.norm = {};
    before.rotate = false;
    UPIPE_RETURN_IF_ERROR(Project(context, shared, xn, begin, before, 0, tile));
    UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormBwdParams{.x = tile,
                                                                .weight = back.forward.norm,
                                                                .dy = gradient,
                                                                .dx = tile,
                                                                .dweight = back.gradients.norm,
                                                                .eps = shared.params.rms_norm_eps,
                                                                .accumulate = false}));
    gradient = tile;
  }
  const TensorView columns = AsMatrix(gradient);
  if (back.gradients.bias.present()) {
    UPIPE_RETURN_IF_ERROR(
        context.Run(kernels::ColumnSumParams{.x = columns, .out = back.gradients.bias}));
  }
  UPIPE_RETURN_IF_ERROR(context.Run(
      kernels::MatmulParams{.a = columns, .b = back.forward.weight, .c = dxn, .beta = beta}));
  return context.Run(kernels::MatmulParams{
      .a = columns, .b = xn, .c = back.gradients.weight, .transpose_a = true, .beta = 1});
}

}  // namespace upipe::attention
