// Rotary embedding, Hugging Face "rotate half" pairs (i, i + D/2).
#include <cmath>
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

// magnitude times the cosine and sine of position * frequency. hf_parity: all factors, products and
// results are fp32.
void CosSin(int64_t position, double frequency, const RopeConfig& config, double& cosine,
            double& sine) {
  const double magnitude = RopeMagnitude(config);
  if (config.hf_parity) {
    const float angle = static_cast<float>(position) * static_cast<float>(frequency);
    cosine = static_cast<float>(std::cos(double{angle})) * static_cast<float>(magnitude);
    sine = static_cast<float>(std::sin(double{angle})) * static_cast<float>(magnitude);
  } else {
    const double angle = static_cast<double>(position) * frequency;
    cosine = magnitude * std::cos(angle);
    sine = magnitude * std::sin(angle);
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
        CosSin(position, frequencies[i], p.config, cosine, sine);
        if (p.inverse) sine = -sine;
        const double x = At(p.src, t, h, i), y = At(p.src, t, h, i + half);
        Element out_x = At(p.dst, t, h, i), out_y = At(p.dst, t, h, i + half);
        out_x = (p.accumulate ? out_x : 0.0) + x * cosine - y * sine;
        out_y = (p.accumulate ? out_y : 0.0) + y * cosine + x * sine;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
