// What follows attention in a block, tiled over tokens so that no [N, F] intermediate exists:
// output projection, residual, norm, SwiGLU. N tokens of this rank, d hidden size, F intermediate
// size; tensors are of the storage type, gradients of weights fp32. Everything is enqueued on the
// rank's compute stream.
#pragma once

#include "absl/status/status.h"
#include "engine/rank_context.h"

namespace upipe::model {

struct MlpWeights {
  kernels::TensorView norm;  // [d]
  kernels::TensorView gate;  // [F, d]
  kernels::TensorView up;    // [F, d]
  kernels::TensorView down;  // [d, F]
};

// What attention hands over: the block's middle stream is h = x + out wo^T.
struct AttentionSide {
  kernels::TensorView x;    // [N, d] layer input
  kernels::TensorView out;  // [N, H * D]
  kernels::TensorView wo;   // [d, H * D]
  AttentionSide Rows(int64_t begin, int64_t rows) const {
    return {.x = x.Rows(begin, rows), .out = out.Rows(begin, rows), .wo = wo};
  }
};

// y [N, d] = h + mlp(norm(h)); y may be x.
absl::Status MlpForward(const engine::RankContext& context, const AttentionSide& attention,
                        const MlpWeights& weights, float eps, const kernels::TensorView& y);

struct MlpGradients {
  MlpWeights mlp;
  kernels::TensorView wo;  // [d, H * D]
};

// dy [N, d]: in, gradient of the block's output; out, gradient of h. Rebuilds h tile by tile;
// accumulates the MLP's gradients and wo's.
absl::Status MlpBackward(const engine::RankContext& context, const AttentionSide& attention,
                         const MlpWeights& weights, float eps, const kernels::TensorView& dy,
                         const MlpGradients& gradients);

}  // namespace upipe::model
