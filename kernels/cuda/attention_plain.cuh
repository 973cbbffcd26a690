// Parts of the plain attention kernels: one row per warp, any storage, strides and head size.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/elements.cuh"

namespace upipe::kernels::cuda {

inline constexpr int kPlainWarps = 4;
inline constexpr int kPlainThreads = 32 * kPlainWarps;
inline constexpr int kPlainNumbers = 256;  // of a row's results that are made at a time
inline constexpr int kPlainPerLane = kPlainNumbers / 32;

template <typename T>
__device__ __forceinline__ float PlainDot(const T* a, const T* b, int count) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += ToFloat(a[i]) * ToFloat(b[i]);
  return sum;
}

// The numbers of a row that one lane owns: first, first + 32, ... below end.
struct PlainNumbers {
  int first;
  int end;

  __device__ int At(int i) const { return first + 32 * i; }
  __device__ bool Has(int i) const { return At(i) < end; }
  // sums += factor * row.
  template <typename T>
  __device__ void AddTo(float (&sums)[kPlainPerLane], float factor, const T* row) const {
    UPIPE_UNROLL
    for (int i = 0; i < kPlainPerLane; ++i) {
      if (Has(i)) sums[i] += factor * ToFloat(row[At(i)]);
    }
  }
};

inline dim3 GridOf(const LaunchRows& rows, int num_heads) {
  return dim3(static_cast<unsigned>(rows.num_tiles()), static_cast<unsigned>(num_heads), 1);
}

}  // namespace upipe::kernels::cuda
