// Sums of exponentials that are put together from parts without overflow: what cross-entropy keeps
// of a row and attention of a run of keys.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace upipe::kernels::cuda {

// sum is that of e^(value - max); a part without values has max = -infinity. A NaN is in the sum
// only, as fmaxf drops it.
struct SoftmaxSum {
  float max, sum;
};

// e^(value - max), 0 for a value of -infinity, also where max is.
__device__ inline float ExpDifference(float value, float max) {
  return value == -INFINITY ? 0.0f : expf(value - max);
}

__device__ inline SoftmaxSum Merge(SoftmaxSum a, SoftmaxSum b) {
  const float max = fmaxf(a.max, b.max);
  return {max, a.sum * ExpDifference(a.max, max) + b.sum * ExpDifference(b.max, max)};
}

__device__ inline double LogSumExp(SoftmaxSum part) {
  return part.max + log(static_cast<double>(part.sum));
}

// How two results over different keys join: o = o_a * weight_a + o_b * weight_b. lse_b is above
// -infinity; where lse_a is not, the result is b bit for bit.
struct LogSumExpMerge {
  float lse, weight_a, weight_b;
};
__device__ inline LogSumExpMerge MergeLogSumExp(float lse_a, float lse_b) {
  const float max = fmaxf(lse_a, lse_b);
  const float a = expf(lse_a - max), b = expf(lse_b - max), sum = a + b;
  return {max + logf(sum), a / sum, b / sum};
}

}  // namespace upipe::kernels::cuda
