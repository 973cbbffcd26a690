// The columns that each row of a launch sees: one interval, whose ends never move back as the row
// grows, so tiles are skipped, taken whole or masked by comparing ends.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/attention_launch.h"

namespace upipe::kernels::cuda {

struct Span {
  int64_t begin;
  int64_t end;
};

// The columns that a row of the tensor sees; begin = end where it sees none.
__device__ __forceinline__ Span ColumnsSeen(const LaunchRows& rows, int64_t row) {
  const int64_t position = rows.row_position + row;
  int document = 0;
  for (int end = rows.num_documents; end - document > 1;) {
    const int middle = (document + end) / 2;
    if (rows.bounds[middle] <= position) {
      document = middle;
    } else {
      end = middle;
    }
  }
  int64_t begin = position - rows.before, end = position + rows.after + 1;
  begin = (begin > rows.bounds[document] ? begin : rows.bounds[document]) - rows.column_position;
  end = (end < rows.bounds[document + 1] ? end : rows.bounds[document + 1]) - rows.column_position;
  begin = begin < 0 ? 0 : begin > rows.num_columns ? rows.num_columns : begin;
  end = end < begin ? begin : end > rows.num_columns ? rows.num_columns : end;
  return {begin, end};
}

// What the rows of a block's tile see, in shared memory.
struct TileMask {
  int64_t begin[kAttentionTileRows];
  int64_t end[kAttentionTileRows];
  int num_rows;

  // By all threads of the block, with a barrier at its end. Rows beyond the launch see nothing.
  __device__ void Fill(const LaunchRows& rows, int64_t first_row) {
    const int64_t left = rows.end_row - first_row;
    const int count = left < kAttentionTileRows ? static_cast<int>(left) : kAttentionTileRows;
    for (int i = threadIdx.x; i < kAttentionTileRows; i += blockDim.x) {
      const Span seen = i < count ? ColumnsSeen(rows, first_row + i) : Span{0, 0};
      begin[i] = seen.begin;
      end[i] = seen.end;
    }
    if (threadIdx.x == 0) num_rows = count;
    __syncthreads();
  }

  // Columns that some row sees.
  __device__ Span Columns() const { return {begin[0], end[num_rows - 1]}; }
  // Whether every row sees the columns [first, first + count).
  __device__ bool SeesAll(int64_t first, int count) const {
    return begin[num_rows - 1] <= first && end[0] >= first + count;
  }
  __device__ bool RowSeesAny(int row) const { return begin[row] < end[row]; }
  // The rows that see some column, one interval; for a tile that has some.
  __device__ Span SeeingRows(int64_t num_columns) const {
    return {FirstRow([&](int row) { return end[row] > 0; }),
            FirstRow([&](int row) { return begin[row] >= num_columns; })};
  }

 private:
  // The first row that `holds`, num_rows if none does; it holds for all rows behind one.
  template <typename Holds>
  __device__ int FirstRow(const Holds& holds) const {
    int low = 0;
    for (int high = num_rows; low < high;) {
      const int middle = (low + high) / 2;
      if (holds(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

// Columns of a tile that one row sees: offsets from the tile's first column.
struct TileSpan {
  int begin;
  int end;
  __device__ bool Has(int column) const { return column >= begin && column < end; }
};

__device__ __forceinline__ TileSpan SpanInTile(const TileMask& mask, int row, int64_t first,
                                               int count) {
  const int64_t begin = mask.begin[row] - first, end = mask.end[row] - first;
  return {begin < 0       ? 0
          : begin > count ? count
                          : static_cast<int>(begin),
          end < 0       ? 0
          : end > count ? count
                        : static_cast<int>(end)};
}

}  // namespace upipe::kernels::cuda
