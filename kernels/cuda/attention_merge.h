// Joins attention over some keys, as cuDNN gives it, to what o and log-sum-exp hold over others.
#pragma once

#include "kernels/api/tensor_view.h"
#include "kernels/cuda/cuda_kernels.h"

namespace upipe::kernels::cuda {

// o = w o + (1 - w) part, lse = ln(e^lse + e^part_lse), with w = e^(lse - the new lse), for every
// query and head: the rule of AttentionFwdParams::merge. A query whose part_lse is -infinity keeps
// both, bit for bit.
struct AttentionMergeParams {
  TensorView part;      // [Tq, heads, head_dim] bf16
  TensorView part_lse;  // [heads, Tq] W, any row stride
  TensorView o;         // [Tq, heads, head_dim] W
  TensorView lse;       // [heads, Tq] W, any row stride
};

void Run(const AttentionMergeParams& p, const LaunchContext& context);

}  // namespace upipe::kernels::cuda
