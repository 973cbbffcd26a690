// The SwiGLU half of a block, tiled over tokens so that no [N, F] intermediate exists. N tokens of
// this rank, d hidden size, F intermediate size; all fp32; everything is enqueued on the rank's
// compute stream.
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

// x [N, d] += mlp(norm(x)), in place.
absl::Status MlpForward(const engine::RankContext& context, const kernels::TensorView& x,
                        const MlpWeights& weights, float eps);

// The attention side of the same tile pass: the block's middle stream is h = x + out wo^T.
struct MlpBackwardInput {
  kernels::TensorView x;              // [N, d] layer input
  kernels::TensorView attention_out;  // [N, H * D]
  kernels::TensorView wo;             // [d, H * D]
  kernels::TensorView wo_gradient;    // [d, H * D], accumulated
};

// dy [N, d]: in, gradient of the block's output; out, gradient of h. Rebuilds h tile by tile;
// accumulates the MLP's gradients and wo's.
absl::Status MlpBackward(const engine::RankContext& context, const MlpBackwardInput& input,
                         const kernels::TensorView& dy, const MlpWeights& weights,
                         const MlpWeights& gradients, float eps);

}  // namespace upipe::model
