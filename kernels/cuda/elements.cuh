// Elements of fp32 and bf16 tensors as kernels read and write them: fp32 in registers, N at a time
// in memory, rounded once when stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/api/tensor_view.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/launch_shape.h"

namespace upipe::kernels::cuda {

__device__ inline float ToFloat(float value) { return value; }
__device__ inline float ToFloat(__nv_bfloat16 value) { return __bfloat162float(value); }

// To nearest even; a NaN keeps its upper payload and becomes quiet, as in kernels/api/bfloat16.h.
template <typename T>
__device__ inline T FromFloat(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    const unsigned bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
      return __ushort_as_bfloat16(static_cast<unsigned short>(bits >> 16 | 0x40u));
    }
    return __float2bfloat16_rn(value);
  }
}

// N elements as they lie in memory, in accesses of at most 16 bytes.
template <typename T, int N>
struct Vector {
  static constexpr int kEach = N * sizeof(T) <= 16 ? N : 16 / static_cast<int>(sizeof(T));
  struct alignas(kEach * sizeof(T)) Access {
    T elements[kEach];
  };
  Access accesses[N / kEach];

  __device__ float operator[](int i) const {
    return ToFloat(accesses[i / kEach].elements[i % kEach]);
  }
  __device__ void Set(int i, float value) {
    accesses[i / kEach].elements[i % kEach] = FromFloat<T>(value);
  }
};

template <int N, typename T>
__device__ inline Vector<T, N> Load(const T* address) {
  using V = Vector<T, N>;
  V vector;
  UPIPE_UNROLL
  for (int i = 0; i < N / V::kEach; ++i) {
    vector.accesses[i] = reinterpret_cast<const typename V::Access*>(address)[i];
  }
  return vector;
}

template <typename T, int N>
__device__ inline void Store(T* address, const Vector<T, N>& vector) {
  using V = Vector<T, N>;
  UPIPE_UNROLL
  for (int i = 0; i < N / V::kEach; ++i) {
    reinterpret_cast<typename V::Access*>(address)[i] = vector.accesses[i];
  }
}

// A rank-3 tensor in a kernel.
template <typename T>
struct Rows {
  T* data;
  int64_t stride0, stride1;

  __device__ T* At(int64_t i, int64_t j, int64_t k = 0) const {
    return data + i * stride0 + j * stride1 + k;
  }
};

template <typename T>
Rows<T> RowsOf(const TensorView& view) {
  return {static_cast<T*>(view.data), view.stride[0], view.stride[1]};
}

// The C++ type of a storage dtype: body(std::type_identity<T>()).
template <typename Body>
void WithStorageType(DType dtype, const Body& body) {
  if (dtype == DType::kBFloat16) {
    body(std::type_identity<__nv_bfloat16>());
  } else {
    body(std::type_identity<float>());
  }
}

// body(std::integral_constant<int, width>()), width being 16 bytes of Narrowest, or 1.
template <typename Narrowest, typename Body>
void WithWidth(bool aligned, const Body& body) {
  if (aligned) {
    body(std::integral_constant<int, 16 / static_cast<int>(sizeof(Narrowest))>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

// Row `offset` rows after (i, j) of [.., n1]. An offset is below 2^30.
struct RowIndex {
  int64_t i, j;
};
__device__ inline RowIndex RowAfter(RowIndex from, unsigned offset, int64_t n1) {
  RowIndex row = {from.i, from.j + offset};
  if (row.j < n1) return row;
  if (n1 > int64_t{1} << 30) return {row.i + 1, row.j - n1};
  const unsigned steps = static_cast<unsigned>(row.j) / static_cast<unsigned>(n1);
  return {row.i + steps, row.j - static_cast<int64_t>(steps) * n1};
}

// Calls load(i, j, vector) for every vector of this thread, then store(i, j, vector, what it
// loaded): loads of kRowsPerThread rows are on their way together. `vector` counts along a row.
template <typename LoadVector, typename StoreVector>
__device__ inline void MoveRows(const RowTiling& tiling, const LoadVector& load,
                                const StoreVector& store) {
  const int64_t vector =
      int64_t{blockIdx.x % tiling.column_blocks} * tiling.threads_x + threadIdx.x;
  const int64_t first =
      int64_t{blockIdx.x / tiling.column_blocks} * (tiling.threads_y * kRowsPerThread);
  if (vector >= tiling.vectors) return;
  const RowIndex begin = {first / tiling.n1, first % tiling.n1};
  decltype(load(int64_t{}, int64_t{}, vector)) values[kRowsPerThread];
  RowIndex rows[kRowsPerThread];
  UPIPE_UNROLL
  for (int k = 0; k < kRowsPerThread; ++k) {
    const unsigned offset = threadIdx.y + k * tiling.threads_y;
    if (first + offset >= tiling.num_rows) break;
    rows[k] = RowAfter(begin, offset, tiling.n1);
    values[k] = load(rows[k].i, rows[k].j, vector);
  }
  UPIPE_UNROLL
  for (int k = 0; k < kRowsPerThread; ++k) {
    if (first + threadIdx.y + k * tiling.threads_y >= tiling.num_rows) break;
    store(rows[k].i, rows[k].j, vector, values[k]);
  }
}

// (threads that share a row, rows) of a block of a kernel that needs whole rows.
inline dim3 RowBlock(int64_t columns, int width) {
  const auto threads = static_cast<unsigned>(ThreadsPerRow(columns, width));
  return dim3(threads, kBlockThreads / threads);
}

inline dim3 BlockOf(const RowTiling& tiling) { return dim3(tiling.threads_x, tiling.threads_y); }

}  // namespace upipe::kernels::cuda
