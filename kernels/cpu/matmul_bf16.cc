#include "kernels/cpu/matmul_bf16.h"

#include <cblas.h>

#include <algorithm>

#include "common/rounding.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/onednn_product.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kSplit = 64;         // oneDNN's own block
constexpr int64_t kMostPieces = 16;    // that run at once
constexpr double kPieceFlops = 1.2e7;  // about 60 microseconds: less is not worth a thread
constexpr int64_t kWorkspaceBytes = int64_t{4} << 20;
// Left to itself oneDNN takes up to 1.2 MB; pieces halved until this is enough run as fast or up to
// a tenth faster.
constexpr int64_t kOnednnBytes = kWorkspaceBytes / kMostPieces;

// Sides of the blocks that become fp32: a [side, depth], b [depth, side] and, when c is bf16, the
// sums [side, side].
struct BlockShape {
  int64_t side, depth;
  constexpr int64_t bytes() const {
    return (2 * side * depth + side * side) * int64_t{sizeof(float)};
  }
};
// In a second-level cache; converting costs a few percent of multiplying.
constexpr BlockShape kLargeBlock = {256, 512};
// Fits in the least part of a workspace.
constexpr BlockShape kSmallBlock = {96, 256};
static_assert(kSmallBlock.bytes() <= kWorkspaceBytes / kMostPieces);

int64_t InnerDim(const MatmulParams& p) { return p.transpose_a ? p.a.shape[0] : p.a.shape[1]; }

// Address of op(a)[i, k] and op(b)[k, j].
void* AddressA(const MatmulParams& p, int64_t i, int64_t k) {
  return p.transpose_a ? p.a.At(k, i) : p.a.At(i, k);
}
void* AddressB(const MatmulParams& p, int64_t k, int64_t j) {
  return p.transpose_b ? p.b.At(j, k) : p.b.At(k, j);
}
void* AddressBias(const MatmulParams& p, int64_t j) {
  return p.bias.present() ? p.bias.At(j) : nullptr;
}

// block [rows, columns] fp32 = rows of `view` from (i, j) on.
void ConvertBlock(const TensorView& view, int64_t i, int64_t j, int64_t rows, int64_t columns,
                  float* block) {
  for (int64_t row = 0; row < rows; ++row) {
    CopyRow(view.At(i + row, j), DType::kBFloat16, block + row * columns, DType::kFloat32, columns,
            /*accumulate=*/false);
  }
}

// One piece, block by block: blocks of the operands become fp32 in scratch, OpenBLAS multiplies
// them. fp32 sums are made in c itself, sums of a bf16 c in scratch.
class ConvertedPiece {
 public:
  ConvertedPiece(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                 int64_t scratch_bytes)
      : p_(p),
        piece_(piece),
        shape_(scratch_bytes < kLargeBlock.bytes() ? kSmallBlock : kLargeBlock) {
    const int64_t depth = std::min(shape_.depth, InnerDim(p));
    a_ = static_cast<float*>(scratch);
    b_ = a_ + std::min(shape_.side, piece.rows) * depth;
    sums_ = b_ + std::min(shape_.side, piece.columns) * depth;
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
      const int64_t depth = std::min(shape_.depth, InnerDim(p_) - k);
      if (p_.transpose_a) {
        ConvertBlock(p_.a, k, block.i, depth, block.rows, a_);
      } else {
        ConvertBlock(p_.a, block.i, k, block.rows, depth, a_);
      }
      if (p_.transpose_b) {
        ConvertBlock(p_.b, block.j, k, block.columns, depth, b_);
      } else {
        ConvertBlock(p_.b, k, block.j, depth, block.columns, b_);
      }
      cblas_sgemm(CblasRowMajor, p_.transpose_a ? CblasTrans : CblasNoTrans,
                  p_.transpose_b ? CblasTrans : CblasNoTrans, block.rows, block.columns, depth,
                  p_.alpha, a_, p_.transpose_a ? block.rows : depth, b_,
                  p_.transpose_b ? depth : block.columns, k == 0 ? beta : 1.0f, sums, stride);
    }
  }

  const MatmulParams& p_;
  const MatmulPiece piece_;
  const BlockShape shape_;
  float *a_, *b_, *sums_;
};

// Halves the longer side of the piece until the product's scratch fits.
absl::Status MultiplyNative(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                            int64_t scratch_bytes) {
  UPIPE_ASSIGN_OR_RETURN(const bool done, MultiplyOnednn({.m = piece.rows,
                                                          .n = piece.columns,
                                                          .k = InnerDim(p),
                                                          .a_stride = p.a.stride[0],
                                                          .b_stride = p.b.stride[0],
                                                          .c_stride = p.c.stride[0],
                                                          .transpose_a = p.transpose_a,
                                                          .transpose_b = p.transpose_b,
                                                          .c_type = p.c.dtype,
                                                          .alpha = p.alpha,
                                                          .beta = p.beta,
                                                          .a = AddressA(p, piece.i, 0),
                                                          .b = AddressB(p, 0, piece.j),
                                                          .bias = AddressBias(p, piece.j),
                                                          .c = p.c.At(piece.i, piece.j)},
                                                         scratch, scratch_bytes));
  if (done) return absl::OkStatus();
  if (std::max(piece.rows, piece.columns) <= kSplit) {
    ConvertedPiece(p, piece, scratch, scratch_bytes).Multiply();
    return absl::OkStatus();
  }
  MatmulPiece first = piece, second = piece;
  if (piece.rows >= piece.columns) {
    first.rows = RoundUp(piece.rows / 2, kSplit);
    second.i += first.rows;
    second.rows -= first.rows;
  } else {
    first.columns = RoundUp(piece.columns / 2, kSplit);
    second.j += first.columns;
    second.columns -= first.columns;
  }
  UPIPE_RETURN_IF_ERROR(MultiplyNative(p, first, scratch, scratch_bytes));
  return MultiplyNative(p, second, scratch, scratch_bytes);
}

}  // namespace

int64_t Bf16PiecesMost(const MatmulParams& p) {
  const int64_t m = p.c.shape[0], n = p.c.shape[1];
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(InnerDim(p));
  const int64_t blocks = CeilDiv(std::max(m, n), kSplit);
  const auto worthwhile = static_cast<int64_t>(std::min(flops / kPieceFlops, double{kMostPieces}));
  return std::max<int64_t>(1, std::min(blocks, worthwhile));
}

// A part of the workspace that is too small for a piece of oneDNN only makes it be halved, and the
// blocks to convert are chosen to fit. Small products need no more than all three matrices as fp32.
int64_t Bf16WorkspaceBytes(const MatmulParams& p) {
  const int64_t m = RoundUp(p.c.shape[0], kSplit), n = RoundUp(p.c.shape[1], kSplit),
                k = RoundUp(InnerDim(p), kSplit);
  const int64_t copies = (m * k + k * n + m * n) * int64_t{sizeof(float)};
  return std::min(kWorkspaceBytes, Bf16PiecesMost(p) * copies);
}

absl::Status MultiplyBf16(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                          int64_t scratch_bytes) {
  // oneDNN would multiply the bias by alpha.
  if (HasBf16Products() && (p.alpha == 1 || !p.bias.present())) {
    return MultiplyNative(p, piece, scratch, std::min(scratch_bytes, kOnednnBytes));
  }
  ConvertedPiece(p, piece, scratch, scratch_bytes).Multiply();
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
