// Sums over rows that become one row, with the same bits whatever the threads: rows lie in at most
// kMostBlocks fixed blocks; a block sums kShortRun rows at a time, runs join the block's total,
// totals join the result, all in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/rounding.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {

class ColumnPartials {
 public:
  ColumnPartials(int64_t rows, int64_t columns)
      : rows_(rows), columns_(columns), rows_per_block_(kShortRun * CeilDiv(rows, kMostRuns)) {}

  // Of the workspace: two rows of fp32 for each block.
  int64_t bytes() const { return blocks() * 2 * columns_ * static_cast<int64_t>(sizeof(float)); }

  // add(first, last, run): run[0:columns] += the sum of rows [first, last). Then out[0:columns] +=
  // the sum of all rows. Blocks run in parallel.
  template <typename Add>
  void Accumulate(Workspace workspace, ExecContext& context, float* out, const Add& add) const {
    float* partials = static_cast<float*>(workspace.data);
    context.parallel.Run(blocks(), [&](int64_t begin, int64_t end, int) {
      for (int64_t block = begin; block < end; ++block) {
        SumBlock(block, partials + 2 * block * columns_, add);
      }
    });
    for (int64_t block = 0; block < blocks(); ++block) Join(partials + 2 * block * columns_, out);
  }

 private:
  static constexpr int64_t kShortRun = 64;  // keeps fp32 sums short
  static constexpr int64_t kMostBlocks = 32;
  static constexpr int64_t kMostRuns = kShortRun * kMostBlocks;

  int64_t blocks() const { return rows_ == 0 ? 0 : CeilDiv(rows_, rows_per_block_); }

  template <typename Add>
  void SumBlock(int64_t block, float* total, const Add& add) const {
    float* run = total + columns_;
    std::fill_n(total, columns_, 0.0f);
    const int64_t last = std::min(rows_, (block + 1) * rows_per_block_);
    for (int64_t row = block * rows_per_block_; row < last; row += kShortRun) {
      std::fill_n(run, columns_, 0.0f);
      add(row, std::min(last, row + kShortRun), run);
      Join(run, total);
    }
  }

  void Join(const float* part, float* sum) const {
    CopyRow(part, DType::kFloat32, sum, DType::kFloat32, columns_, /*accumulate=*/true);
  }

  int64_t rows_, columns_, rows_per_block_;
};

}  // namespace upipe::kernels::cpu
