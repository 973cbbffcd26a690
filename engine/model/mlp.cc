#include "engine/model/mlp.h"

#include <algorithm>

#include "common/status.h"
#include "engine/attention/head_chunk_attention.h"

namespace upipe::model {

using attention::kTokenTile;
using engine::RankContext;
using kernels::Buffer;
using kernels::DType;
using kernels::MatmulParams;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

TensorView Tile(const Buffer& buffer, int64_t rows, int64_t cols) {
  return TensorView::Matrix(buffer.data(), DType::kFloat32, rows, cols);
}

absl::Status GateAndUp(const RankContext& context, const TensorView& xn, const MlpWeights& weights,
                       const TensorView& gate, const TensorView& up) {
  UPIPE_RETURN_IF_ERROR(
      context.Run(MatmulParams{.a = xn, .b = weights.gate, .c = gate, .transpose_b = true}));
  return context.Run(MatmulParams{.a = xn, .b = weights.up, .c = up, .transpose_b = true});
}

// Scratch of one backward tile.
struct BackwardTiles {
  Buffer h, xn, dxn, gate, up, hidden;
};

absl::Status BackwardTile(const RankContext& context, const MlpBackwardInput& in,
                          const TensorView& dy, const MlpWeights& w, const MlpWeights& g, float eps,
                          const BackwardTiles& tiles) {
  const int64_t rows = dy.shape[0];
  const int64_t d = dy.shape[1];
  const int64_t f = w.gate.shape[0];
  const TensorView h = Tile(tiles.h, rows, d);
  const TensorView xn = Tile(tiles.xn, rows, d);
  const TensorView dxn = Tile(tiles.dxn, rows, d);
  const TensorView gate = Tile(tiles.gate, rows, f);
  const TensorView up = Tile(tiles.up, rows, f);
  const TensorView hidden = Tile(tiles.hidden, rows, f);
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::StridedCopyParams{.src = in.x.AsTensor3(), .dst = h.AsTensor3()}));
  UPIPE_RETURN_IF_ERROR(context.Run(
      MatmulParams{.a = in.attention_out, .b = in.wo, .c = h, .transpose_b = true, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::RmsNormFwdParams{.x = h, .weight = w.norm, .y = xn, .eps = eps}));
  UPIPE_RETURN_IF_ERROR(GateAndUp(context, xn, w, gate, up));
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::SwiGluFwdParams{.gate = gate, .up = up, .out = hidden}));
  UPIPE_RETURN_IF_ERROR(
      context.Run(MatmulParams{.a = dy, .b = hidden, .c = g.down, .transpose_a = true, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = dy, .b = w.down, .c = hidden}));  // d(hidden)
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::SwiGluBwdParams{.dout = hidden, .gate = gate, .up = up}));
  UPIPE_RETURN_IF_ERROR(
      context.Run(MatmulParams{.a = gate, .b = xn, .c = g.gate, .transpose_a = true, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(
      context.Run(MatmulParams{.a = up, .b = xn, .c = g.up, .transpose_a = true, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = gate, .b = w.gate, .c = dxn}));
  UPIPE_RETURN_IF_ERROR(context.Run(MatmulParams{.a = up, .b = w.up, .c = dxn, .beta = 1}));
  UPIPE_RETURN_IF_ERROR(context.Run(kernels::RmsNormBwdParams{
      .x = h, .weight = w.norm, .dy = dxn, .dx = dy, .dweight = g.norm, .eps = eps}));
  // dy is dh now.
  return context.Run(MatmulParams{
      .a = dy, .b = in.attention_out, .c = in.wo_gradient, .transpose_a = true, .beta = 1});
}

}  // namespace

absl::Status MlpForward(const RankContext& context, const TensorView& x, const MlpWeights& weights,
                        float eps) {
  const int64_t n = x.shape[0];
  const int64_t d = x.shape[1];
  const int64_t f = weights.gate.shape[0];
  const int64_t tile = std::min(kTokenTile, n);
  UPIPE_ASSIGN_OR_RETURN(Buffer xn_buffer, context.AllocateFloats(MemoryTag::kWorkspace, tile * d));
  UPIPE_ASSIGN_OR_RETURN(Buffer gate_buffer, context.AllocateFloats(MemoryTag::kMlp, tile * f));
  UPIPE_ASSIGN_OR_RETURN(Buffer up_buffer, context.AllocateFloats(MemoryTag::kMlp, tile * f));
  for (int64_t begin = 0; begin < n; begin += tile) {
    const int64_t rows = std::min(tile, n - begin);
    const TensorView x_tile = x.Rows(begin, rows);
    const TensorView xn = Tile(xn_buffer, rows, d);
    const TensorView gate = Tile(gate_buffer, rows, f);
    const TensorView up = Tile(up_buffer, rows, f);
    UPIPE_RETURN_IF_ERROR(context.Run(
        kernels::RmsNormFwdParams{.x = x_tile, .weight = weights.norm, .y = xn, .eps = eps}));
    UPIPE_RETURN_IF_ERROR(GateAndUp(context, xn, weights, gate, up));
    UPIPE_RETURN_IF_ERROR(
        context.Run(kernels::SwiGluFwdParams{.gate = gate, .up = up, .out = gate}));
    UPIPE_RETURN_IF_ERROR(context.Run(
        MatmulParams{.a = gate, .b = weights.down, .c = x_tile, .transpose_b = true, .beta = 1}));
  }
  return absl::OkStatus();
}

absl::Status MlpBackward(const RankContext& context, const MlpBackwardInput& input,
                         const TensorView& dy, const MlpWeights& weights,
                         const MlpWeights& gradients, float eps) {
  const int64_t n = dy.shape[0];
  const int64_t d = dy.shape[1];
  const int64_t f = weights.gate.shape[0];
  const int64_t tile = std::min(kTokenTile, n);
  BackwardTiles tiles;
  for (Buffer* buffer : {&tiles.h, &tiles.xn, &tiles.dxn}) {
    UPIPE_ASSIGN_OR_RETURN(*buffer, context.AllocateFloats(MemoryTag::kWorkspace, tile * d));
  }
  for (Buffer* buffer : {&tiles.gate, &tiles.up, &tiles.hidden}) {
    UPIPE_ASSIGN_OR_RETURN(*buffer, context.AllocateFloats(MemoryTag::kMlp, tile * f));
  }
  for (int64_t begin = 0; begin < n; begin += tile) {
    const int64_t rows = std::min(tile, n - begin);
    MlpBackwardInput in = input;
    in.x = input.x.Rows(begin, rows);
    in.attention_out = input.attention_out.Rows(begin, rows);
    UPIPE_RETURN_IF_ERROR(
        BackwardTile(context, in, dy.Rows(begin, rows), weights, gradients, eps, tiles));
  }
  return absl::OkStatus();
}

}  // namespace upipe::model
