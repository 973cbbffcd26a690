// Sums over threads in a fixed order: within a warp by a butterfly, over warps ascending.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"

namespace upipe::kernels::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarpThreads = 32;

// Of M sums at once: each thread's values become those over the `group` threads it shares a row
// with. A group is a power of two, at most a block; blockDim.x is the group, all threads of the
// block call together. 4 * 8 * M bytes of shared memory.
template <int M>
__device__ inline void RowSums(float (&values)[M], int group) {
  const int lanes = min(group, kWarpThreads);
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    UPIPE_UNROLL
    for (int m = 0; m < M; ++m) values[m] += __shfl_xor_sync(kAllLanes, values[m], distance);
  }
  if (group <= kWarpThreads) return;
  UPIPE_SHARED(warp_sums, float[kBlockThreads / 32][M]);
  const int thread = static_cast<int>(threadIdx.y) * group + static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpThreads, warps = group / kWarpThreads;
  __syncthreads();  // sums of the call before have been read
  if (thread % kWarpThreads == 0) {
    UPIPE_UNROLL
    for (int m = 0; m < M; ++m) warp_sums[warp][m] = values[m];
  }
  __syncthreads();
  const int first = warp / warps * warps;
  UPIPE_UNROLL
  for (int m = 0; m < M; ++m) {
    values[m] = warp_sums[first][m];
    for (int w = 1; w < warps; ++w) values[m] += warp_sums[first + w][m];
  }
}

}  // namespace upipe::kernels::cuda
