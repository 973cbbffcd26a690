// What an attention layer is told and handed: schedule, token map, memory policy, shapes, weights.
#pragma once

#include <cstdint>

#include "engine/parallel/head_schedule.h"
#include "engine/parallel/token_map.h"
#include "engine/rank_context.h"

namespace upipe::attention {

// Rows of [tokens, d] worked on at a time where a full-length intermediate would cost memory.
inline constexpr int64_t kTokenTile = 512;

struct AttentionWeights {
  kernels::TensorView norm;  // [d]
  kernels::TensorView wq;    // [H * D, d]
  kernels::TensorView wk;    // [K * D, d]
  kernels::TensorView wv;    // [K * D, d]
  kernels::TensorView wo;    // [d, H * D]
  // Absent where the model has none.
  kernels::TensorView bq;              // [H * D]
  kernels::TensorView bk, bv;          // [K * D]
  kernels::TensorView q_norm, k_norm;  // [D]: RMSNorm of every query and key head before RoPE
};

// Same shapes, fp32, accumulated. wo is not touched here: its gradient belongs to the MLP-backward
// tile pass, which has dh and the attention output in hand.
using AttentionGradients = AttentionWeights;

struct AttentionLayerParams {
  const v1::HeadChunkSchedule* schedule = nullptr;  // borrowed
  parallel::TokenMap tokens;
  engine::MemoryPolicy policy;
  int64_t hidden_size = 0;
  int64_t head_dim = 0;
  float rms_norm_eps = 1e-5f;
  kernels::RopeConfig rope;
};

// What of a sequence attention looks at.
struct Sequence {
  kernels::TensorView positions;  // [N] int64, rotary positions of this rank's tokens
  kernels::AttentionMask mask;    // over global positions
};

}  // namespace upipe::attention
