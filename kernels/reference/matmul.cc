// c = alpha * op(a) op(b) + beta * c + bias, one dot product at a time.
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {

absl::Status Backend::Run(const MatmulParams& p, Workspace, ExecContext&) {
  const int64_t depth = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
  for (int64_t i = 0; i < p.c.shape[0]; ++i) {
    for (int64_t j = 0; j < p.c.shape[1]; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const double a = p.transpose_a ? At(p.a, k, i) : At(p.a, i, k);
        const double b = p.transpose_b ? At(p.b, j, k) : At(p.b, k, j);
        sum += a * b;
      }
      const double before = p.beta == 0 ? 0.0 : double{p.beta} * At(p.c, i, j);
      const double bias = p.bias.present() ? At(p.bias, j) : 0.0;
      At(p.c, i, j) = p.alpha * sum + before + bias;
    }
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const ColumnSumParams& p, Workspace, ExecContext&) {
  for (int64_t j = 0; j < p.x.shape[1]; ++j) {
    double sum = 0;
    for (int64_t t = 0; t < p.x.shape[0]; ++t) sum += At(p.x, t, j);
    At(p.out, j) += sum;
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
