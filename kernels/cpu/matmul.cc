// Matrix products by OpenBLAS. The rows or the columns of c are split over the pool in multiples of
// kSplit; each piece is one single-threaded sgemm, so the split depends on shapes and threads only.
#include <cblas.h>

#include <algorithm>

#include "kernels/cpu/cpu_backend.h"

namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kSplit = 48;  // a multiple of every sgemm kernel's own block

void ScaleRows(const TensorView& c, float beta) {
  for (int64_t i = 0; i < c.shape[0]; ++i) {
    float* row = Ptr(c, i);
    for (int64_t j = 0; j < c.shape[1]; ++j) row[j] = beta == 0 ? 0 : beta * row[j];
  }
}

}  // namespace

absl::Status Backend::Run(const MatmulParams& p, Workspace, ExecContext& context) {
  const int64_t m = p.c.shape[0], n = p.c.shape[1];
  const int64_t depth = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
  if (m == 0 || n == 0) return absl::OkStatus();
  if (depth == 0) {
    ScaleRows(p.c, p.beta);
    return absl::OkStatus();
  }
  const bool split_rows = m >= n;
  const int64_t extent = split_rows ? m : n;
  context.parallel.Run((extent + kSplit - 1) / kSplit, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kSplit, count = std::min(extent, end * kSplit) - first;
    const int64_t i = split_rows ? first : 0, j = split_rows ? 0 : first;
    cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans,
                p.transpose_b ? CblasTrans : CblasNoTrans, split_rows ? count : m,
                split_rows ? n : count, depth, p.alpha,
                p.transpose_a ? Ptr(p.a, 0, i) : Ptr(p.a, i), p.a.stride[0],
                p.transpose_b ? Ptr(p.b, j) : Ptr(p.b, 0, j), p.b.stride[0], p.beta, Ptr(p.c, i, j),
                p.c.stride[0]);
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
