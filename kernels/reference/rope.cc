// Rotary embedding, Hugging Face "rotate half" pairs (i, i + D/2).
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

// The cosine and sine of position * frequency. hf_parity: both factors and the product are fp32,
// and so are the results.
void CosSin(int64_t position, double frequency, bool hf_parity, double& cosine, double& sine) {
  if (hf_parity) {
    const float angle = static_cast<float>(position) * static_cast<float>(frequency);
    cosine = static_cast<float>(std::cos(double{angle}));
    sine = static_cast<float>(std::sin(double{angle}));
  } else {
    const double angle = static_cast<double>(position) * frequency;
    cosine = std::cos(angle);
    sine = std::sin(angle);
  }
}

}  // namespace

absl::Status Backend::Run(const RopeParams& p, Workspace, ExecContext&) {
  const int64_t half = p.src.shape[2] / 2;
  const std::vector<double> frequencies = RopeInverseFrequencies(p.config, p.src.shape[2]);
  for (int64_t t = 0; t < p.src.shape[0]; ++t) {
    const int64_t position = p.positions.as<int64_t>()[t];
    for (int64_t h = 0; h < p.src.shape[1]; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        double cosine, sine;
        CosSin(position, frequencies[i], p.config.hf_parity, cosine, sine);
        if (p.inverse) sine = -sine;
        const double x = At(p.src, t, h, i), y = At(p.src, t, h, i + half);
        float& out_x = At(p.dst, t, h, i);
        float& out_y = At(p.dst, t, h, i + half);
        out_x = (p.accumulate ? out_x : 0.0) + x * cosine - y * sine;
        out_y = (p.accumulate ? out_y : 0.0) + y * cosine + x * sine;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
