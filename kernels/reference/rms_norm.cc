// y = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) + eps).
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

double InverseRms(const TensorView& x, int64_t t, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < x.shape[1]; ++i) sum += double{At(x, t, i)} * At(x, t, i);
  return 1.0 / std::sqrt(sum / x.shape[1] + eps);
}

}  // namespace

absl::Status Backend::Run(const RmsNormFwdParams& p, Workspace, ExecContext&) {
  for (int64_t t = 0; t < p.x.shape[0]; ++t) {
    const double rstd = InverseRms(p.x, t, p.eps);
    for (int64_t i = 0; i < p.x.shape[1]; ++i)
      At(p.y, t, i) = At(p.x, t, i) * rstd * At(p.weight, i);
  }
  return absl::OkStatus();
}

// With n = x * rstd: dweight = sum_t dy * n; dx = rstd * (dy * weight - n * mean(dy * weight * n)).
absl::Status Backend::Run(const RmsNormBwdParams& p, Workspace, ExecContext&) {
  const int64_t tokens = p.x.shape[0], d = p.x.shape[1];
  std::vector<double> dweight(d);
  for (int64_t t = 0; t < tokens; ++t) {
    const double rstd = InverseRms(p.x, t, p.eps);
    for (int64_t i = 0; i < d; ++i) dweight[i] += At(p.dy, t, i) * (At(p.x, t, i) * rstd);
  }
  for (int64_t i = 0; i < d; ++i) At(p.dweight, i) += dweight[i];
  for (int64_t t = 0; t < tokens; ++t) {
    const double rstd = InverseRms(p.x, t, p.eps);
    double mean = 0;
    for (int64_t i = 0; i < d; ++i)
      mean += double{At(p.dy, t, i)} * At(p.weight, i) * At(p.x, t, i) * rstd / d;
    for (int64_t i = 0; i < d; ++i) {
      const double n = At(p.x, t, i) * rstd;
      At(p.dx, t, i) += rstd * (double{At(p.dy, t, i)} * At(p.weight, i) - n * mean);
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
