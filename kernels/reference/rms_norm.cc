// y = h * rstd * weight with rstd = 1 / sqrt(mean(h^2) + eps) over the last dim; [T, d] is seen as
// [T, 1, d].
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

// Of row (t, head).
double InverseRms(const TensorView& x, int64_t t, int64_t head, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < x.shape[2]; ++i) sum += double{At(x, t, head, i)} * At(x, t, head, i);
  return 1.0 / std::sqrt(sum / static_cast<double>(x.shape[2]) + eps);
}

}  // namespace

absl::Status Backend::Run(const RmsNormFwdParams& p, Workspace, ExecContext&) {
  const bool add = p.residual.present();
  const TensorView x = p.x.AsTensor3(), y = p.y.AsTensor3(), residual = p.residual.AsTensor3();
  const TensorView h = add ? p.sum.AsTensor3() : x;
  for (int64_t t = 0; t < x.shape[0]; ++t) {
    for (int64_t head = 0; head < x.shape[1]; ++head) {
      for (int64_t i = 0; add && i < x.shape[2]; ++i) {
        At(h, t, head, i) = double{At(x, t, head, i)} + At(residual, t, head, i);
      }
      const double rstd = InverseRms(h, t, head, p.eps);
      for (int64_t i = 0; i < x.shape[2]; ++i) {
        At(y, t, head, i) = At(h, t, head, i) * rstd * At(p.weight, i);
      }
    }
  }
  return absl::OkStatus();
}

// With n = x * rstd: dweight = sum_t dy * n; dx = rstd * (dy * weight - n * mean(dy * weight * n)).
absl::Status Backend::Run(const RmsNormBwdParams& p, Workspace, ExecContext&) {
  const TensorView x = p.x.AsTensor3(), dy = p.dy.AsTensor3(), dx = p.dx.AsTensor3();
  const int64_t d = x.shape[2];
  std::vector<double> dweight(d);
  for (int64_t t = 0; t < x.shape[0]; ++t) {
    for (int64_t head = 0; head < x.shape[1]; ++head) {
      const double rstd = InverseRms(x, t, head, p.eps);
      double mean = 0;
      for (int64_t i = 0; i < d; ++i) {
        const double n = At(x, t, head, i) * rstd;
        dweight[i] += At(dy, t, head, i) * n;
        mean += double{At(dy, t, head, i)} * At(p.weight, i) * n / static_cast<double>(d);
      }
      for (int64_t i = 0; i < d; ++i) {
        const double n = At(x, t, head, i) * rstd;
        const double gradient = rstd * (double{At(dy, t, head, i)} * At(p.weight, i) - n * mean);
        At(dx, t, head, i) = (p.accumulate ? At(dx, t, head, i) : 0.0) + gradient;
      }
    }
  }
  for (int64_t i = 0; i < d; ++i) At(p.dweight, i) += dweight[i];
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
