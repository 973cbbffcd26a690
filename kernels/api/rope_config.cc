// Rotary frequencies, once for every backend. Source: Hugging Face transformers
// modeling_rope_utils.py, _compute_default_rope_parameters and _compute_llama3_parameters.
#include <cmath>
#include <numbers>

#include "kernels/api/op_params.h"

namespace upipe::kernels {
namespace {

// Real is double for exact frequencies; float repeats Hugging Face's roundings (a Python scalar
// divided by a tensor is reciprocal, then product, in PyTorch).
template <typename Real>
Real Llama3Scaled(Real frequency, const RopeConfig::Llama3Scaling& scaling) {
  const double context = static_cast<double>(scaling.original_context);
  const Real low_wavelength = static_cast<Real>(context / scaling.low_freq_factor);
  const Real high_wavelength = static_cast<Real>(context / scaling.high_freq_factor);
  const Real factor = static_cast<Real>(scaling.factor);
  const Real wavelength = (Real{1} / frequency) * static_cast<Real>(2 * std::numbers::pi);
  if (wavelength < high_wavelength) return frequency;
  if (wavelength > low_wavelength) return frequency / factor;
  const Real smooth = ((Real{1} / wavelength) * static_cast<Real>(context) -
                       static_cast<Real>(scaling.low_freq_factor)) /
                      static_cast<Real>(scaling.high_freq_factor - scaling.low_freq_factor);
  return (Real{1} - smooth) * frequency / factor + smooth * frequency;
}

template <typename Real>
std::vector<double> Frequencies(const RopeConfig& config, int64_t head_dim) {
  std::vector<double> frequencies(head_dim / 2);
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const Real exponent = static_cast<Real>(2 * i) / static_cast<Real>(head_dim);
    const Real frequency = Real{1} / std::pow(static_cast<Real>(config.theta), exponent);
    frequencies[i] = config.llama3 ? Llama3Scaled<Real>(frequency, *config.llama3) : frequency;
  }
  return frequencies;
}

}  // namespace

std::vector<double> RopeInverseFrequencies(const RopeConfig& config, int64_t head_dim) {
  return config.hf_parity ? Frequencies<float>(config, head_dim)
                          : Frequencies<double>(config, head_dim);
}

}  // namespace upipe::kernels
