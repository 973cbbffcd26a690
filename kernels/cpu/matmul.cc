// Matrix products. The rows or the columns of c are split over the pool; each piece is one
// single-threaded call, so the split depends on shapes and threads only. fp32 goes to OpenBLAS,
// bf16 to matmul_bf16.
#include <cblas.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/matmul_bf16.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {
namespace {

// Pieces are multiples of these, the libraries' own blocks: the finer, the more even.
constexpr int64_t kSplitFp32 = 16;
constexpr int64_t kSplitBf16 = 64;
constexpr int64_t kCacheLine = 64;

// The piece of c between blocks [begin, end) of its longer side.
MatmulPiece PieceOf(const MatmulParams& p, int64_t block, int64_t begin, int64_t end) {
  const int64_t m = p.c.shape[0], n = p.c.shape[1];
  const int64_t first = begin * block, last = std::min(std::max(m, n), end * block);
  if (m >= n) return {.i = first, .rows = last - first, .j = 0, .columns = n};
  return {.i = 0, .rows = m, .j = first, .columns = last - first};
}

// c = beta * c + bias.
void FinishPiece(const MatmulParams& p, const MatmulPiece& piece, float beta) {
  for (int64_t row = piece.i; row < piece.i + piece.rows; ++row) {
    FinishProductRow({.beta = beta,
                      .bias = p.bias.present() ? p.bias.At(piece.j) : nullptr,
                      .bias_type = p.bias.dtype,
                      .c = p.c.At(row, piece.j),
                      .c_type = p.c.dtype},
                     piece.columns);
  }
}

void MultiplyFp32(const MatmulParams& p, const MatmulPiece& piece, int64_t depth) {
  cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
              p.transpose_b ? CblasTrans : CblasNoTrans, piece.rows, piece.columns, depth, p.alpha,
              p.transpose_a ? Ptr(p.a, 0, piece.i) : Ptr(p.a, piece.i), p.a.stride[0],
              p.transpose_b ? Ptr(p.b, piece.j) : Ptr(p.b, 0, piece.j), p.b.stride[0], p.beta,
              Ptr(p.c, piece.i, piece.j), p.c.stride[0]);
  if (p.bias.present()) FinishPiece(p, piece, 1);
}

void Multiply(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
              int64_t scratch_bytes) {
  const int64_t depth = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
  if (depth == 0 || p.alpha == 0) {
    FinishPiece(p, piece, p.beta);
  } else if (p.a.dtype == DType::kBFloat16) {
    MultiplyBf16(p, piece, scratch, scratch_bytes);
  } else {
    MultiplyFp32(p, piece, depth);
  }
}

// OpenBLAS takes the distance between rows as a 32-bit number and would cut it short in silence.
absl::Status CheckRowStrides(const MatmulParams& p) {
  constexpr int64_t kMost = std::numeric_limits<blasint>::max();
  for (const auto& [field, view] : {std::pair{"a", &p.a}, {"b", &p.b}, {"c", &p.c}}) {
    if (view->stride[0] <= kMost) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("matmul: rows of ", field, " are ", view->stride[0],
                     " elements apart, must be at most ", kMost, ", what OpenBLAS can express"));
  }
  return absl::OkStatus();
}

// Of a view with one row the distance between rows says nothing; the libraries want it to hold the
// row all the same, and OpenBLAS leaves the product undone where it does not.
TensorView WithRoomForOneRow(TensorView view) {
  if (view.shape[0] == 1) view.stride[0] = view.shape[1];
  return view;
}

}  // namespace

int64_t Backend::WorkspaceBytes(const MatmulParams& p) {
  return p.a.dtype == DType::kBFloat16 ? Bf16WorkspaceBytes(p) : 0;
}

absl::Status Backend::Run(const MatmulParams& given, Workspace workspace, ExecContext& context) {
  if (given.c.num_elements() == 0) return absl::OkStatus();
  MatmulParams p = given;
  for (TensorView* view : {&p.a, &p.b, &p.c}) *view = WithRoomForOneRow(*view);
  UPIPE_RETURN_IF_ERROR(CheckRowStrides(p));
  const bool bf16 = p.a.dtype == DType::kBFloat16;
  const int64_t block = bf16 ? kSplitBf16 : kSplitFp32;
  const int64_t blocks = (std::max(p.c.shape[0], p.c.shape[1]) + block - 1) / block;
  const int64_t units = bf16 ? Bf16PiecesMost(p) : blocks;
  const int64_t parts = std::min<int64_t>(units, context.parallel.num_threads());
  const int64_t scratch_bytes = WorkspaceBytes(p) / parts / kCacheLine * kCacheLine;
  context.parallel.Run(units, [&](int64_t begin, int64_t end, int thread) {
    void* scratch = static_cast<char*>(workspace.data) + thread * scratch_bytes;
    Multiply(p, PieceOf(p, block, blocks * begin / units, blocks * end / units), scratch,
             scratch_bytes);
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
