// How tensors are cut into blocks and threads: plain C++, the same numbers for a GPU, the emulator
// and unit tests. A tensor is seen as rows, [n0, n1] of them, of n2 elements that lie together; a
// thread takes `width` elements at a time, 16 bytes of the narrowest tensor, or 1 where addresses
// or strides forbid that. Counts and offsets are 64-bit.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "kernels/api/tensor_view.h"

namespace upipe::kernels::cuda {

inline constexpr int kBlockThreads = 256;
inline constexpr int kRowsPerThread = 2;  // of a RowTiling

// Elements in 16 bytes.
constexpr int WidthOf(DType dtype) { return static_cast<int>(16 / SizeOf(dtype)); }

// True when every row of every tensor can be read `width` elements at a time, in accesses of at
// most 16 bytes that are aligned.
bool RowsAligned(std::initializer_list<TensorView> tensors, int width);

// Tensors of one shape, all without gaps, become one row each; otherwise they only become rank 3.
void MergeRows(std::initializer_list<TensorView*> tensors);

// Rows of a rank-3 tensor over a grid: a block takes threads_x * width columns of threads_y *
// kRowsPerThread rows.
struct RowTiling {
  int64_t num_rows;  // n0 * n1
  int64_t n1;
  int64_t vectors;  // of `width` elements, in a row
  uint32_t column_blocks;
  uint32_t num_blocks;
  uint32_t threads_x, threads_y;
};
RowTiling TileRows(const TensorView& tensor, int width);

// The number of threads that share a row in a kernel that needs the whole row at once: a power of
// two, at most a block. Beyond a warp, which needs no barrier, each has four vectors of the row, so
// that as many loads are on their way.
int ThreadsPerRow(int64_t columns, int width);

// Blocks that hold `each` of n things; at most 2^31 - 1, as a grid has.
uint32_t NumBlocks(int64_t n, int64_t each);

// Blocks of rows whose sums over rows become one row: block b has rows [b * rows_per_block, ...).
// It depends on the number of rows alone, so that sums are the same on every device.
struct RowBlocks {
  int64_t num_blocks;
  int64_t rows_per_block;
};
RowBlocks ReductionBlocks(int64_t num_rows);
inline constexpr int64_t kReductionBlocksMax = 4 * 132;  // 4 on each multiprocessor of an H200

}  // namespace upipe::kernels::cuda
