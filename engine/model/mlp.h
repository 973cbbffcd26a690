// What follows attention in a block, tiled over tokens so that no [N, F] intermediate exists:
// output projection, residual, norm, SwiGLU. N tokens of this rank, d hidden size, F intermediate
// size; tensors are of the storage type, gradients of weights fp32. Tensors over tokens live on the
// device or in host memory, with the same results. Everything is enqueued; later work of the
// compute stream comes after it.
#pragma once

#include "absl/status/status.h"
#include "engine/rank_context.h"
#include "engine/token_tensor.h"

namespace upipe::model {

struct MlpWeights {
  kernels::TensorView norm;  // [d]
  kernels::TensorView gate;  // [F, d]
  kernels::TensorView up;    // [F, d]
  kernels::TensorView down;  // [d, F]
};

// What attention hands over: the block's middle stream is h = x + out wo^T.
struct AttentionSide {
  const engine::TokenTensor& x;    // [N, d] layer input
  const engine::TokenTensor& out;  // [N, H * D]
  kernels::TensorView wo;          // [d, H * D]
};

// y [N, d] = h + mlp(norm(h)); y may be x.
absl::Status MlpForward(const engine::RankContext& context, const AttentionSide& attention,
                        const MlpWeights& weights, float eps, const engine::TokenTensor& y);

struct MlpGradients {
  MlpWeights mlp;
  kernels::TensorView wo;  // [d, H * D]
};

// dy [N, d]: in, gradient of the block's output; out, gradient of h. Rebuilds h tile by tile;
// accumulates the MLP's gradients and wo's.
absl::Status MlpBackward(const engine::RankContext& context, const AttentionSide& attention,
                         const MlpWeights& weights, float eps, const engine::TokenTensor& dy,
                         const MlpGradients& gradients);

}  // namespace upipe::model
