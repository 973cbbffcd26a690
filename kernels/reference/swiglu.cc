// out = silu(gate) * up, silu(g) = g / (1 + exp(-g)).
#include <cmath>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {

absl::Status Backend::Run(const SwiGluFwdParams& p, Workspace, ExecContext&) {
  for (int64_t t = 0; t < p.gate.shape[0]; ++t) {
    for (int64_t i = 0; i < p.gate.shape[1]; ++i) {
      const double gate = At(p.gate, t, i);
      At(p.out, t, i) = gate / (1 + std::exp(-gate)) * At(p.up, t, i);
    }
  }
  return absl::OkStatus();
}

// silu'(g) = s * (1 + g * (1 - s)) with s = 1 / (1 + exp(-g)).
absl::Status Backend::Run(const SwiGluBwdParams& p, Workspace, ExecContext&) {
  for (int64_t t = 0; t < p.gate.shape[0]; ++t) {
    for (int64_t i = 0; i < p.gate.shape[1]; ++i) {
      const double gate = At(p.gate, t, i), up = At(p.up, t, i), dout = At(p.dout, t, i);
      const double sigmoid = 1 / (1 + std::exp(-gate));
      At(p.dout, t, i) = gate / (1 + std::exp(-gate)) * up;
      At(p.gate, t, i) = dout * up * sigmoid * (1 + gate * (1 - sigmoid));
      At(p.up, t, i) = dout * gate * sigmoid;
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
