// Projections of the normalised hidden stream into heads, and the way back through them: RMSNorm,
// product, bias, q/k-norm and RoPE, tile by tile, so that no [N, d] normalised stream exists.
#pragma once

#include <functional>

#include "engine/attention/attention_layer.h"
#include "engine/token_tensor.h"

namespace upipe::attention {

// What makes queries, keys or values of the normalised stream. Views of the weights.
struct Projection {
  kernels::TensorView weight;  // [heads * D, d]
  kernels::TensorView bias;    // [heads * D] or absent
  kernels::TensorView norm;    // [D] or absent
  bool rotate = true;          // by RoPE
};

// What all projections of a layer share.
struct ProjectionShared {
  const AttentionLayerParams& params;
  const engine::TokenTensor& x;          // [N, d]
  const kernels::TensorView& norm;       // [d], the layer's input norm
  const kernels::TensorView& positions;  // [N] int64
};

// body(begin, normalised tile [rows, d]) over this rank's tokens [begin, end).
absl::Status ForNormalisedTiles(
    const engine::RankContext& context, const ProjectionShared& shared, int64_t begin, int64_t end,
    const std::function<absl::Status(int64_t begin, const kernels::TensorView& xn)>& body);

// heads [rows, heads, D] = xn projected to as many heads from `first_head` on, normalised and
// rotated as the projection says. xn [rows, d] are the tokens from `begin` on.
absl::Status Project(const engine::RankContext& context, const ProjectionShared& shared,
                     const kernels::TensorView& xn, int64_t begin, const Projection& projection,
                     int64_t first_head, const kernels::TensorView& heads);

// The way back through a projection, a tile at a time.
struct ProjectionBack {
  Projection forward;    // the weights
  Projection gradients;  // views of the weights' gradients
};
// dxn [rows, d] fp32 = beta * dxn + the gradient through one projection; adds to the gradients of
// its weights. `heads` [rows, heads, D]: gradient of what left Project, but for RoPE, which is
// undone already. `scratch` holds the heads before their norm, where there is one.
absl::Status ProjectTileBack(const engine::RankContext& context, const ProjectionShared& shared,
                             const ProjectionBack& back, const kernels::TensorView& heads,
                             const kernels::TensorView& xn, int64_t begin,
                             const kernels::Buffer& scratch, float beta,
                             const kernels::TensorView& dxn);

}  // namespace upipe::attention
