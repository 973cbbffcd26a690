#include "kernels/cpu/matmul_bf16.h"

#include <cblas.h>

#include <algorithm>

#include "common/rounding.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/matmul_pairs.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kSplit = 2 * kPairPanel;
constexpr int64_t kMostPieces = 16;    // that run at once
constexpr double kPieceFlops = 1.2e7;  // about 60 microseconds: less is not worth a thread
constexpr int64_t kWorkspaceBytes = int64_t{4} << 20;

// Blocks that are multiplied at once: op(a) [side, depth], op(b) [depth, side] and, when c is bf16,
// the sums [side, side].
struct BlockShape {
  int64_t side, depth;
};

// Of operands that become fp32. In a second-level cache; converting costs a few percent of
// multiplying.
constexpr BlockShape kLargeBlock = {256, 512};
// Fits in the least part of a workspace.
constexpr BlockShape kSmallBlock = {96, 256};
constexpr int64_t ConvertedBytes(const BlockShape& shape) {
  return (2 * shape.side * shape.depth + shape.side * shape.side) * int64_t{sizeof(float)};
}
static_assert(ConvertedBytes(kSmallBlock) <= kWorkspaceBytes / kMostPieces);

// Of operands that are packed as pairs: the longer the side, the less is packed twice. The depth is
// the same for every side, and with it the order of each sum.
constexpr int64_t kPairDepth = 512;
constexpr int64_t kMostPairSide = 512, kLeastPairSide = 96;
constexpr int64_t PairBytes(int64_t rows, int64_t columns, int64_t depth, bool fp32_sum) {
  return PairBlockBytes(rows, columns, depth) +
         (fp32_sum ? 0 : rows * columns * int64_t{sizeof(float)});
}
static_assert(PairBytes(kLeastPairSide, kLeastPairSide, kPairDepth, false) <=
              kWorkspaceBytes / kMostPieces);

int64_t InnerDim(const MatmulParams& p) { return p.transpose_a ? p.a.shape[0] : p.a.shape[1]; }

// Address of op(a)[i, k] and op(b)[k, j].
const uint16_t* AddressA(const MatmulParams& p, int64_t i, int64_t k) {
  return static_cast<const uint16_t*>(p.transpose_a ? p.a.At(k, i) : p.a.At(i, k));
}
const uint16_t* AddressB(const MatmulParams& p, int64_t k, int64_t j) {
  return static_cast<const uint16_t*>(p.transpose_b ? p.b.At(j, k) : p.b.At(k, j));
}
void* AddressBias(const MatmulParams& p, int64_t j) {
  return p.bias.present() ? p.bias.At(j) : nullptr;
}

// block [rows, columns] fp32 = `from`, rows of bf16 that are `stride` elements apart.
void ConvertBlock(const uint16_t* from, int64_t stride, int64_t rows, int64_t columns,
                  float* block) {
  for (int64_t row = 0; row < rows; ++row) {
    CopyRow(from + row * stride, DType::kBFloat16, block + row * columns, DType::kFloat32, columns,
            /*accumulate=*/false);
  }
}

// One piece, block by block: copies of the operands' blocks are made in scratch, as pairs for the
// processor's own products or as fp32 for OpenBLAS. fp32 sums are made in c itself, sums of a bf16
// c in scratch.
class BlockwisePiece {
 public:
  BlockwisePiece(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                 int64_t scratch_bytes)
      : p_(p), piece_(piece), native_(HasBf16Products()), operands_(static_cast<float*>(scratch)) {
    if (native_) {
      PlanPairs(scratch_bytes);
    } else {
      PlanConverted(scratch_bytes);
    }
  }

  void Multiply() const {
    const int64_t last_row = piece_.i + piece_.rows, last_column = piece_.j + piece_.columns;
    for (int64_t j = piece_.j; j < last_column; j += shape_.side) {
      for (int64_t i = piece_.i; i < last_row; i += shape_.side) {
        MultiplyBlock({.i = i,
                       .rows = std::min(shape_.side, last_row - i),
                       .j = j,
                       .columns = std::min(shape_.side, last_column - j)});
      }
    }
  }

 private:
  void PlanPairs(int64_t scratch_bytes) {
    const bool fp32_sum = p_.c.dtype == DType::kFloat32;
    const int64_t depth = std::min(kPairDepth, InnerDim(p_));
    shape_ = {kMostPairSide, kPairDepth};
    const auto rows = [&] { return std::min(shape_.side, piece_.rows); };
    const auto columns = [&] { return std::min(shape_.side, piece_.columns); };
    while (shape_.side > kLeastPairSide &&
           PairBytes(rows(), columns(), depth, fp32_sum) > scratch_bytes) {
      shape_.side -= kPairPanel;
    }
    sums_ = operands_ + PairBlockBytes(rows(), columns(), depth) / int64_t{sizeof(float)};
  }

  void PlanConverted(int64_t scratch_bytes) {
    shape_ = scratch_bytes < ConvertedBytes(kLargeBlock) ? kSmallBlock : kLargeBlock;
    sums_ =
        operands_ + (std::min(shape_.side, piece_.rows) + std::min(shape_.side, piece_.columns)) *
                        std::min(shape_.depth, InnerDim(p_));
  }

  void MultiplyBlock(const MatmulPiece& block) const {
    const bool in_place = p_.c.dtype == DType::kFloat32;
    if (in_place) {
      Sum(block, Ptr(p_.c, block.i, block.j), p_.c.stride[0], p_.beta);
      if (!p_.bias.present()) return;
    } else {
      Sum(block, sums_, block.columns, 0);
    }
    for (int64_t row = 0; row < block.rows; ++row) {
      FinishProductRow({.product = in_place ? nullptr : sums_ + row * block.columns,
                        .beta = in_place ? 1.0f : p_.beta,
                        .bias = AddressBias(p_, block.j),
                        .bias_type = p_.bias.dtype,
                        .c = p_.c.At(block.i + row, block.j),
                        .c_type = p_.c.dtype},
                       block.columns);
    }
  }

  // sums [rows, columns] = alpha * op(a) op(b) + beta * sums.
  void Sum(const MatmulPiece& block, float* sums, int64_t stride, float beta) const {
    for (int64_t k = 0; k < InnerDim(p_); k += shape_.depth) {
      const PairBlock product = {.rows = block.rows,
                                 .columns = block.columns,
                                 .depth = std::min(shape_.depth, InnerDim(p_) - k),
                                 .a = AddressA(p_, block.i, k),
                                 .a_stride = p_.a.stride[0],
                                 .transpose_a = p_.transpose_a,
                                 .b = AddressB(p_, k, block.j),
                                 .b_stride = p_.b.stride[0],
                                 .transpose_b = p_.transpose_b,
                                 .alpha = p_.alpha,
                                 .beta = k == 0 ? beta : 1.0f,
                                 .c = sums,
                                 .c_stride = stride};
      if (native_) {
        MultiplyPairBlock(product, operands_);
      } else {
        MultiplyConverted(product);
      }
    }
  }

  void MultiplyConverted(const PairBlock& x) const {
    float *a = operands_, *b = operands_ + x.rows * x.depth;
    const int64_t a_columns = x.transpose_a ? x.rows : x.depth,
                  b_columns = x.transpose_b ? x.depth : x.columns;
    ConvertBlock(x.a, x.a_stride, x.transpose_a ? x.depth : x.rows, a_columns, a);
    ConvertBlock(x.b, x.b_stride, x.transpose_b ? x.columns : x.depth, b_columns, b);
    cblas_sgemm(CblasRowMajor, x.transpose_a ? CblasTrans : CblasNoTrans,
                x.transpose_b ? CblasTrans : CblasNoTrans, x.rows, x.columns, x.depth, x.alpha, a,
                a_columns, b, b_columns, x.beta, x.c, x.c_stride);
  }

  const MatmulParams& p_;
  const MatmulPiece piece_;
  const bool native_;
  float* const operands_;
  BlockShape shape_ = {};
  float* sums_ = nullptr;
};

}  // namespace

int64_t Bf16PiecesMost(const MatmulParams& p) {
  const int64_t m = p.c.shape[0], n = p.c.shape[1];
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(InnerDim(p));
  const int64_t blocks = CeilDiv(std::max(m, n), kSplit);
  const auto worthwhile = static_cast<int64_t>(std::min(flops / kPieceFlops, double{kMostPieces}));
  return std::max<int64_t>(1, std::min(blocks, worthwhile));
}

// The blocks are chosen to fit a part. Small products need no more than all three matrices as fp32.
int64_t Bf16WorkspaceBytes(const MatmulParams& p) {
  const int64_t m = RoundUp(p.c.shape[0], kSplit), n = RoundUp(p.c.shape[1], kSplit),
                k = RoundUp(InnerDim(p), kSplit);
  const int64_t copies = (m * k + k * n + m * n) * int64_t{sizeof(float)};
  return std::min(kWorkspaceBytes, Bf16PiecesMost(p) * copies);
}

void MultiplyBf16(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                  int64_t scratch_bytes) {
  BlockwisePiece(p, piece, scratch, scratch_bytes).Multiply();
}

}  // namespace upipe::kernels::cpu
