// Gradient norm, the clip rule and AdamW.
#include <algorithm>
#include <cmath>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {

absl::Status Backend::Run(const SumOfSquaresParams& p, Workspace, ExecContext&) {
  double sum = 0;
  for (int64_t i = 0; i < p.x.shape[0]; ++i) sum += double{At(p.x, i)} * At(p.x, i);
  *p.out.as<double>() += sum;
  return absl::OkStatus();
}

absl::Status Backend::Run(const ClipScaleParams& p, Workspace, ExecContext&) {
  double count = 0;
  for (int64_t range = 0; range < p.loss_and_count.shape[0]; ++range) {
    count += *static_cast<double*>(p.loss_and_count.At(range, 1));
  }
  const double norm = std::sqrt(*p.sum_of_squares.as<double>()) / count;
  const bool skip = !(count > 0) || !std::isfinite(norm);
  const double clip = std::min(1.0, p.max_norm / (norm + 1e-6));
  *p.grad_norm.as<float>() = norm;
  *p.scale.as<float>() = skip ? 0.0 : clip / count;
  *p.skip.as<int32_t>() = skip;
  return absl::OkStatus();
}

absl::Status Backend::Run(const AdamWParams& p, Workspace, ExecContext&) {
  if (*p.skip.as<int32_t>() != 0) return absl::OkStatus();
  const double beta1 = p.beta1, beta2 = p.beta2;
  const double correction1 = 1 - std::pow(beta1, p.step), correction2 = 1 - std::pow(beta2, p.step);
  for (int64_t i = 0; i < p.param.shape[0]; ++i) {
    const double grad = double{At(p.grad, i)} * *p.scale.as<float>();
    const double m = beta1 * At(p.m, i) + (1 - beta1) * grad;
    const double v = beta2 * At(p.v, i) + (1 - beta2) * grad * grad;
    const double step = m / correction1 / (std::sqrt(v / correction2) + p.eps);
    At(p.param, i) += -p.lr * (step + double{p.weight_decay} * At(p.param, i));
    At(p.m, i) = m;
    At(p.v, i) = v;
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
