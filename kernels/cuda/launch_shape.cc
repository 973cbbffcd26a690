#include "kernels/cuda/launch_shape.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "common/check.h"
#include "common/rounding.h"

namespace upipe::kernels::cuda {
namespace {

constexpr int64_t kReductionRowsMin = 8;
constexpr int64_t kGridMax = std::numeric_limits<int32_t>::max();

}  // namespace

bool RowsAligned(std::initializer_list<TensorView> tensors, int width) {
  for (const TensorView& view : tensors) {
    if (!view.present()) continue;
    const int64_t bytes = std::min<int64_t>(16, width * SizeOf(view.dtype));
    if (view.shape[view.rank - 1] % width != 0) return false;
    if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(bytes) != 0) return false;
    for (int dim = 0; dim + 1 < view.rank; ++dim) {
      if (view.shape[dim] > 1 && view.stride[dim] * SizeOf(view.dtype) % bytes != 0) return false;
    }
  }
  return true;
}

void MergeRows(std::initializer_list<TensorView*> tensors) {
  const bool gapless = std::all_of(tensors.begin(), tensors.end(), [](const TensorView* view) {
    return !view->present() || view->contiguous();
  });
  for (TensorView* view : tensors) {
    if (!view->present()) continue;
    const int64_t n = view->num_elements();
    *view =
        gapless ? TensorView::Tensor3(view->data, view->dtype, {1, 1, n}, n, n) : view->AsTensor3();
  }
}

RowTiling TileRows(const TensorView& tensor, int width) {
  UPIPE_CHECK(tensor.rank == 3 && tensor.shape[2] % width == 0);
  RowTiling tiling = {};
  tiling.num_rows = tensor.shape[0] * tensor.shape[1];
  tiling.n1 = tensor.shape[1];
  tiling.vectors = tensor.shape[2] / width;
  if (tiling.num_rows == 0 || tiling.vectors == 0) return tiling;
  tiling.threads_x = static_cast<uint32_t>(
      std::min<uint64_t>(kBlockThreads, std::bit_ceil(static_cast<uint64_t>(tiling.vectors))));
  tiling.threads_y = kBlockThreads / tiling.threads_x;
  const int64_t column_blocks = CeilDiv(tiling.vectors, int64_t{tiling.threads_x});
  const int64_t row_blocks = CeilDiv(tiling.num_rows, int64_t{tiling.threads_y} * kRowsPerThread);
  UPIPE_CHECK(column_blocks <= kGridMax / row_blocks)
      << "a tensor of " << tensor.num_elements() << " elements needs more blocks than a grid has";
  tiling.column_blocks = static_cast<uint32_t>(column_blocks);
  tiling.num_blocks = static_cast<uint32_t>(column_blocks * row_blocks);
  return tiling;
}

int ThreadsPerRow(int64_t columns, int width) {
  constexpr uint64_t kWarp = 32, kVectorsPerThread = 4;
  const uint64_t vectors = static_cast<uint64_t>(CeilDiv(columns, int64_t{width}));
  if (vectors <= kWarp) return static_cast<int>(std::bit_ceil(vectors));
  const uint64_t threads = std::bit_ceil((vectors + kVectorsPerThread - 1) / kVectorsPerThread);
  return static_cast<int>(std::clamp<uint64_t>(threads, kWarp, kBlockThreads));
}

uint32_t NumBlocks(int64_t n, int64_t each) {
  const int64_t blocks = CeilDiv(n, each);
  UPIPE_CHECK(blocks <= kGridMax) << n << " things, " << each << " a block, need " << blocks
                                  << " blocks; a grid has " << kGridMax;
  return static_cast<uint32_t>(blocks);
}

RowBlocks ReductionBlocks(int64_t num_rows) {
  if (num_rows == 0) return {0, 0};
  const int64_t at_most = std::min(kReductionBlocksMax, CeilDiv(num_rows, kReductionRowsMin));
  const int64_t rows_per_block = CeilDiv(num_rows, at_most);
  return {CeilDiv(num_rows, rows_per_block), rows_per_block};
}

}  // namespace upipe::kernels::cuda
