#include "kernels/cuda/matmul_calls.h"

#include <algorithm>

namespace upipe::kernels {
namespace {

constexpr int kAlignmentMax = 16;
constexpr int64_t kCutMultiple = 128;  // of rows and depth, so that pieces keep whole tiles

int AlignmentOf(const void* data, int64_t row_bytes) {
  const uint64_t bits =
      reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(row_bytes) | kAlignmentMax;
  return static_cast<int>(bits & (~bits + 1));
}

// Elements from row to row; that of a single row means nothing, and must not be below its length.
int64_t StrideOf(const TensorView& matrix) {
  return std::max({matrix.stride[0], matrix.shape[1], int64_t{1}});
}

int64_t CutTo(int64_t length, int64_t stride) {
  const int64_t fits = std::max(kCutMultiple, kMatmulElementsMax / stride);
  return length <= fits ? length : fits / kCutMultiple * kCutMultiple;
}

// Rows [row, row + rows) of c, [from, from + depth) of the inner dim.
MatmulCall Piece(const MatmulParams& p, int64_t row, int64_t rows, int64_t from, int64_t depth) {
  const TensorView c = p.c.Rows(row, rows);
  const void* a = p.transpose_a ? p.a.At(from, row) : p.a.At(row, from);
  const void* b = p.transpose_b ? p.b.At(0, from) : p.b.At(from, 0);
  const int64_t element = SizeOf(p.a.dtype);
  MatmulCall call;
  call.key = {.rows = c.shape[1],
              .columns = rows,
              .depth = depth,
              .first_transposed = p.transpose_b,
              .second_transposed = p.transpose_a,
              .first_stride = StrideOf(p.b),
              .second_stride = StrideOf(p.a),
              .out_stride = StrideOf(p.c),
              .storage = p.a.dtype,
              .out = p.c.dtype,
              .first_alignment = AlignmentOf(b, StrideOf(p.b) * element),
              .second_alignment = AlignmentOf(a, StrideOf(p.a) * element),
              .out_alignment = AlignmentOf(c.data, StrideOf(p.c) * SizeOf(p.c.dtype)),
              .workspace_bytes = kMatmulWorkspaceBytes};
  call.first = b;
  call.second = a;
  call.out = c.data;
  call.alpha = p.alpha;
  call.beta = p.beta;
  return call;
}

void AddBias(const MatmulParams& p, MatmulCall& call) {
  call.key.bias = true;
  call.bias = p.bias.data;
}

// c = beta * c + bias, as a product of depth 1 of zeros.
MatmulCall ScaleOnly(const MatmulParams& p, int64_t row, int64_t rows, void* zeros) {
  MatmulParams q = p;
  q.a = TensorView::Matrix(zeros, p.a.dtype, rows, 1);
  q.b = TensorView::Matrix(zeros, p.a.dtype, 1, p.c.shape[1]);
  q.c = p.c.Rows(row, rows);
  q.transpose_a = q.transpose_b = false;
  q.alpha = 0;
  MatmulCall call = Piece(q, 0, rows, 0, 1);
  call.key.workspace_bytes = 0;
  return call;
}

}  // namespace

MatmulCalls CallsOf(const MatmulParams& p, void* workspace) {
  MatmulCalls result;
  const int64_t rows = p.c.shape[0], columns = p.c.shape[1];
  const int64_t depth = p.a.shape[p.transpose_a ? 0 : 1];
  if (rows == 0 || columns == 0) return result;
  result.bias_after = p.bias.present() && p.bias.dtype != p.c.dtype;
  const bool bias = p.bias.present() && !result.bias_after;
  int64_t rows_cut =
      CutTo(rows, std::max(StrideOf(p.c), p.transpose_a ? int64_t{1} : StrideOf(p.a)));
  int64_t depth_cut = depth;
  if (depth == 0) {
    rows_cut = std::min(rows_cut, kMatmulWorkspaceBytes / int64_t{sizeof(float)});
    result.zero_bytes = std::max(rows_cut, columns) * SizeOf(p.a.dtype);
  } else if (p.transpose_a && p.c.dtype == DType::kFloat32) {
    depth_cut = CutTo(depth, std::max(StrideOf(p.a), p.transpose_b ? int64_t{1} : StrideOf(p.b)));
  }
  for (int64_t row = 0; row < rows; row += rows_cut) {
    const int64_t piece_rows = std::min(rows_cut, rows - row);
    if (depth == 0) result.calls.push_back(ScaleOnly(p, row, piece_rows, workspace));
    for (int64_t from = 0; from < depth; from += depth_cut) {
      result.calls.push_back(Piece(p, row, piece_rows, from, std::min(depth_cut, depth - from)));
      if (from > 0) result.calls.back().beta = 1;
      if (from == 0 && bias) AddBias(p, result.calls.back());
    }
    if (depth == 0 && bias) AddBias(p, result.calls.back());
  }
  return result;
}

}  // namespace upipe::kernels
