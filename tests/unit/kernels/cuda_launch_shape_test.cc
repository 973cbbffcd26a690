// How tensors become blocks and threads, for more elements than 32 bits count.
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/cuda/fault.h"
#include "kernels/cuda/launch_shape.h"

namespace upipe::kernels::cuda {
namespace {

void* At(uintptr_t address) { return reinterpret_cast<void*>(address); }

TEST(LaunchShape, SixteenBytesAtATimeNeedAlignedRows) {
  const auto rows = [](uintptr_t address, DType dtype, int64_t columns, int64_t stride) {
    return TensorView::Matrix(At(address), dtype, 4, columns, stride);
  };
  const DType bf16 = DType::kBFloat16, fp32 = DType::kFloat32;
  EXPECT_TRUE(RowsAligned({rows(64, bf16, 24, 32)}, 8));
  EXPECT_FALSE(RowsAligned({rows(72, bf16, 24, 32)}, 8));  // its address
  EXPECT_FALSE(RowsAligned({rows(64, bf16, 20, 32)}, 8));  // its width
  EXPECT_FALSE(RowsAligned({rows(64, bf16, 24, 36)}, 8));  // its stride
  EXPECT_TRUE(RowsAligned({rows(64, bf16, 24, 36).Rows(0, 1)}, 8));
  // Eight fp32 numbers are two accesses; four bf16 ones are one of 8 bytes.
  EXPECT_TRUE(RowsAligned({rows(64, bf16, 24, 32), rows(16, fp32, 24, 28)}, 8));
  EXPECT_FALSE(RowsAligned({rows(64, bf16, 24, 32), rows(16, fp32, 24, 30)}, 8));
  EXPECT_TRUE(RowsAligned({rows(72, bf16, 24, 36)}, 4));
  EXPECT_TRUE(RowsAligned({TensorView()}, 8));
  EXPECT_TRUE(RowsAligned({rows(2, bf16, 7, 9)}, 1));
}

TEST(LaunchShape, TensorsWithoutGapsBecomeOneRow) {
  TensorView a = TensorView::Tensor3(At(16), DType::kBFloat16, {3, 5, 7}, 35, 7), b = a;
  MergeRows({&a, &b});
  EXPECT_EQ(a.shape, (std::array<int64_t, 3>{1, 1, 105}));
  TensorView c = TensorView::Tensor3(At(16), DType::kBFloat16, {3, 5, 7}, 40, 7);
  TensorView d = TensorView::Tensor3(At(16), DType::kBFloat16, {3, 5, 7}, 35, 7);
  MergeRows({&c, &d});
  EXPECT_EQ(d.shape, (std::array<int64_t, 3>{3, 5, 7}));
}

// Every row and every vector has its thread.
void ExpectCovers(const TensorView& tensor, int width) {
  const RowTiling t = TileRows(tensor, width);
  EXPECT_EQ(t.threads_x * t.threads_y, static_cast<uint32_t>(kBlockThreads));
  EXPECT_EQ(t.num_blocks % t.column_blocks, 0u);
  const int64_t row_blocks = t.num_blocks / t.column_blocks;
  const int64_t rows_per_block = int64_t{t.threads_y} * kRowsPerThread;
  EXPECT_GE(row_blocks * rows_per_block, t.num_rows);
  EXPECT_LT((row_blocks - 1) * rows_per_block, t.num_rows);
  EXPECT_GE(int64_t{t.column_blocks} * t.threads_x, t.vectors);
  EXPECT_LT((int64_t{t.column_blocks} - 1) * t.threads_x, t.vectors);
}

TEST(LaunchShape, TilingsCoverTensorsBeyond32BitCounts) {
  const auto tensor = [](int64_t n0, int64_t n1, int64_t n2) {
    return TensorView::Tensor3(At(16), DType::kBFloat16, {n0, n1, n2}, n1 * n2, n2);
  };
  ExpectCovers(tensor(1, 1, 1), 1);
  ExpectCovers(tensor(3, 5, 7), 1);
  ExpectCovers(tensor(2, 2, 20000), 8);
  ExpectCovers(tensor(1, 1, int64_t{1} << 33), 8);         // 2^33 elements of one row
  ExpectCovers(tensor(5 << 20, 32, 128), 8);               // 2^34, 5M tokens
  ExpectCovers(tensor(1, (int64_t{1} << 32) + 3, 16), 8);  // more than 2^32 rows
  const RowTiling rows = TileRows(tensor(int64_t{1} << 31, 3, 8), 8);
  EXPECT_EQ(rows.num_rows, 3 * (int64_t{1} << 31));
  EXPECT_EQ(rows.n1, 3);
  EXPECT_EQ(TileRows(tensor(4, 0, 8), 8).num_blocks, 0u);
  EXPECT_EQ(TileRows(tensor(4, 2, 0), 8).num_blocks, 0u);
  EXPECT_EQ(NumBlocks((int64_t{1} << 33) + 1, 1024), (1u << 23) + 1);
  EXPECT_EQ(NumBlocks(0, 7), 0u);
}

TEST(LaunchShapeDeathTest, MoreBlocksThanAGridHas) {
  EXPECT_DEATH(NumBlocks(int64_t{1} << 31, 1), "a grid has");
}

TEST(LaunchShape, ThreadsOfARow) {
  EXPECT_EQ(ThreadsPerRow(1, 8), 1);
  EXPECT_EQ(ThreadsPerRow(128, 8), 16);
  EXPECT_EQ(ThreadsPerRow(67, 1), 32);
  EXPECT_EQ(ThreadsPerRow(1024, 8), 32);
  EXPECT_EQ(ThreadsPerRow(4096, 8), 128);
  EXPECT_EQ(ThreadsPerRow(int64_t{1} << 33, 8), kBlockThreads);
}

TEST(LaunchShape, ReductionBlocksCoverAllRowsAndNoMore) {
  for (const int64_t rows : {int64_t{1}, int64_t{7}, int64_t{9}, int64_t{4224}, int64_t{4225},
                             int64_t{100'000}, (int64_t{1} << 33) + 1}) {
    const RowBlocks blocks = ReductionBlocks(rows);
    EXPECT_LE(blocks.num_blocks, std::min(rows, kReductionBlocksMax));
    EXPECT_GE(blocks.num_blocks * blocks.rows_per_block, rows);
    EXPECT_LT((blocks.num_blocks - 1) * blocks.rows_per_block, rows);
  }
  EXPECT_EQ(ReductionBlocks(0).num_blocks, 0);
}

TEST(Fault, SaysWhatRowAndVocabulary) {
  EXPECT_TRUE(FaultStatus(kNoFault).ok());
  const auto words = [](FaultKind kind, int64_t vocab, int64_t row, int32_t value) {
    return FaultWords{row << 32 | static_cast<int64_t>(static_cast<uint32_t>(value)),
                      static_cast<int64_t>(kind) << 32 | vocab};
  };
  EXPECT_EQ(FaultStatus(words(FaultKind::kEmbeddingToken, 7, 2'000'000'000, -1)),
            absl::OutOfRangeError("embedding: token -1 at row 2000000000 is outside the vocabulary "
                                  "[0, 7)"));
  EXPECT_EQ(FaultStatus(words(FaultKind::kCrossEntropyLabel, 151'936, 3, 151'936)),
            absl::OutOfRangeError("cross_entropy: label 151936 at row 3 is outside the vocabulary "
                                  "[0, 151936)"));
}

}  // namespace
}  // namespace upipe::kernels::cuda
