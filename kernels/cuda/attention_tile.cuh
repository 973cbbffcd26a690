// Tiles of bf16 rows in shared memory and the products of them by one warp: what the attention
// kernels on tensor cores are made of. A tile is [rows, kDim]; its 16-byte chunks are permuted
// within a row by row % 8, so that eight rows of one column of chunks lie in eight banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_mask.cuh"
#include "kernels/cuda/elements.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.h"

namespace upipe::kernels::cuda {

inline constexpr int kBf16Bytes = 2;
inline constexpr int kChunk = 8;  // bf16 numbers of one 16-byte access
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;

// Bytes of a tile.
template <int kRows, int kDim>
inline constexpr int kTileBytes = kRows* kDim* kBf16Bytes;

// Starts the copy of rows [first, first + kRows) of one head; rows outside `present` and numbers
// from head_dim on are zeros.
template <int kRows, int kDim, int kThreads>
__device__ __forceinline__ void CopyTile(const Rows<const __nv_bfloat16>& from, int64_t head,
                                         int64_t first, Span present, int head_dim,
                                         SharedAddress to) {
  constexpr int kChunks = kDim / kChunk, kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kStep % 8 == 0 && kRows % kStep == 0);
  const int chunk = threadIdx.x % kChunks, first_row = threadIdx.x / kChunks;
  const bool inside = chunk * kChunk < head_dim;
  const bool whole = present.begin <= first && present.end >= first + kRows;
  const int64_t step = kStep * from.stride0;
  const __nv_bfloat16* address = from.At(first + first_row, head, chunk * kChunk);
  to += first_row * kDim * kBf16Bytes + ((chunk ^ (first_row % 8)) << 4);
  UPIPE_UNROLL
  for (int row = 0; row < kRows; row += kStep, address += step) {
    bool is_present = inside;
    if (!whole) {
      const int64_t i = first + first_row + row;
      is_present = inside && i >= present.begin && i < present.end;
    }
    CopyAsync16(address, is_present, to + row * kDim * kBf16Bytes);
  }
}

// Where one lane reads the 16 x 16 blocks of a tile. Rows go in steps of 16 and numbers too.
template <int kDim>
struct BlockReader {
  SharedAddress base;

  __device__ __forceinline__ SharedAddress At(int row_block, int block) const {
    return (base ^ ((block % 4) << 5)) + block / 4 * 128 + row_block * 16 * kDim * kBf16Bytes;
  }
};

// Blocks as left operands, and transposed as right operands: matrices 0 and 1 are the upper and
// lower rows of the left numbers, 2 and 3 those of the right ones.
template <int kDim>
__device__ __forceinline__ BlockReader<kDim> LeftBlocks(SharedAddress tile) {
  const int lane = threadIdx.x % 32, row = lane % 16, chunk = lane / 16;
  return {tile + row * kDim * kBf16Bytes + ((chunk ^ (row % 8)) << 4)};
}

// Blocks as right operands: matrices 0 and 1 are the left and right numbers of the upper rows.
template <int kDim>
__device__ __forceinline__ BlockReader<kDim> RightBlocks(SharedAddress tile) {
  const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
  return {tile + row * kDim * kBf16Bytes + ((chunk ^ (row % 8)) << 4)};
}

template <int kBlocks, int kColumns>
__device__ __forceinline__ void SetZero(float (&c)[kBlocks][kColumns][4]) {
  UPIPE_UNROLL
  for (int m = 0; m < kBlocks; ++m) {
    UPIPE_UNROLL
    for (int n = 0; n < kColumns; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
  }
}

// c = a b^T over all kDim: c is [16 kRowBlocks, 8 kColumns].
template <int kDim, int kRowBlocks, int kColumns>
__device__ __forceinline__ void MultiplyRows(const BlockReader<kDim>& a, const BlockReader<kDim>& b,
                                             float (&c)[kRowBlocks][kColumns][4]) {
  SetZero(c);
  UPIPE_UNROLL
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t left[kRowBlocks][4];
    UPIPE_UNROLL
    for (int m = 0; m < kRowBlocks; ++m) LoadMatrices(a.At(m, k), left[m]);
    UPIPE_UNROLL
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t right[4];
      LoadMatrices(b.At(n / 2, k), right);
      UPIPE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        MultiplyAdd(left[m], right[0], right[1], c[m][n]);
        MultiplyAdd(left[m], right[2], right[3], c[m][n + 1]);
      }
    }
  }
}

// Numbers rounded to bf16, as left operands: c is [16 kRowBlocks, 16 kDepth].
template <int kRowBlocks, int kDepth>
__device__ __forceinline__ void PackLeft(const float (&c)[kRowBlocks][2 * kDepth][4],
                                         uint32_t (&a)[kRowBlocks][kDepth][4]) {
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int k = 0; k < kDepth; ++k) {
      UPIPE_UNROLL
      for (int half = 0; half < 2; ++half) {
        a[m][k][2 * half] = PackBf16(c[m][2 * k + half][0], c[m][2 * k + half][1]);
        a[m][k][2 * half + 1] = PackBf16(c[m][2 * k + half][2], c[m][2 * k + half][3]);
      }
    }
  }
}

// c += a b, b being rows [0, 16 kDepth) of a tile and, of their numbers, 8 kColumns from where the
// reader stands.
template <int kDim, int kRowBlocks, int kDepth, int kColumns>
__device__ __forceinline__ void MultiplyColumns(const uint32_t (&a)[kRowBlocks][kDepth][4],
                                                const BlockReader<kDim>& b,
                                                float (&c)[kRowBlocks][kColumns][4]) {
  UPIPE_UNROLL
  for (int k = 0; k < kDepth; ++k) {
    UPIPE_UNROLL
    for (int n = 0; n < kColumns; n += 2) {
      uint32_t right[4];
      LoadMatricesTransposed(b.At(k, n / 2), right);
      UPIPE_UNROLL
      for (int m = 0; m < kRowBlocks; ++m) {
        MultiplyAdd(a[m][k], right[0], right[1], c[m][n]);
        MultiplyAdd(a[m][k], right[2], right[3], c[m][n + 1]);
      }
    }
  }
}

// Numbers of a warp's rows, from first_row of the tile on, become `value` in columns that the row
// does not see.
template <int kRowBlocks, int kColumns>
__device__ __forceinline__ void SetUnseen(const TileMask& mask, int first_row, int64_t first_column,
                                          float value, float (&c)[kRowBlocks][kColumns][4]) {
  const int lane = threadIdx.x % 32;
  UPIPE_UNROLL
  for (int m = 0; m < kRowBlocks; ++m) {
    UPIPE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const TileSpan seen =
          SpanInTile(mask, first_row + m * 16 + half * 8 + lane / 4, first_column, kColumns * 8);
      UPIPE_UNROLL
      for (int n = 0; n < kColumns; ++n) {
        UPIPE_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (!seen.Has(n * 8 + lane % 4 * 2 + e)) c[m][n][2 * half + e] = value;
        }
      }
    }
  }
}

// True where tiles can be copied 16 bytes at a time.
inline bool IsTiled(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && view.stride[0] % kChunk == 0 &&
         view.stride[1] % kChunk == 0 && view.shape[2] % kChunk == 0;
}

// True where results can be stored two numbers at a time.
inline bool IsPaired(const TensorView& view) {
  return reinterpret_cast<uintptr_t>(view.data) % (2 * SizeOf(view.dtype)) == 0 &&
         view.stride[0] % 2 == 0 && view.stride[1] % 2 == 0;
}

}  // namespace upipe::kernels::cuda
