// Rotary frequencies, once for every backend. Source: Hugging Face transformers
// modeling_rope_utils.py, the _compute_*_parameters of each scaling. Real is double for exact
// frequencies; float repeats Hugging Face's roundings in PyTorch: a Python scalar becomes fp32
// where it meets a tensor, and a scalar divided by a tensor is reciprocal, then product.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/api/op_params.h"

namespace upipe::kernels {
namespace {

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

// Grown by (factor * context / original - (factor - 1)) ^ (D / (D - 2)), the context being a
// tensor of one number, whose powers PyTorch takes in double. Within the original context it is
// theta.
template <typename Real>
Real DynamicTheta(double theta, const RopeConfig::DynamicNtkScaling& scaling, int64_t head_dim) {
  if (scaling.context <= scaling.original_context) return static_cast<Real>(theta);
  const Real stretch = static_cast<Real>(scaling.factor) * static_cast<Real>(scaling.context) /
                           static_cast<Real>(scaling.original_context) -
                       static_cast<Real>(scaling.factor - 1);
  const double exponent = static_cast<double>(head_dim) / static_cast<double>(head_dim - 2);
  return static_cast<Real>(theta) * static_cast<Real>(std::pow(double{stretch}, exponent));
}

// The pairs from `begin` on are blended, those from `end` on divided by the factor.
struct YarnBlend {
  double begin, end;
};

YarnBlend YarnBlendOf(double theta, const RopeConfig::YarnScaling& scaling, int64_t head_dim) {
  const auto pair_turning = [&](double times) {
    const double context = static_cast<double>(scaling.original_context);
    return static_cast<double>(head_dim) * std::log(context / (times * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  double begin = pair_turning(scaling.beta_fast), end = pair_turning(scaling.beta_slow);
  if (scaling.truncate) {
    begin = std::floor(begin);
    end = std::ceil(end);
  }
  begin = std::max(begin, 0.0);
  end = std::min(end, static_cast<double>(head_dim - 1));
  return {begin, begin == end ? end + 0.001 : end};
}

template <typename Real>
Real YarnScaled(Real frequency, Real tokens_per_radian, Real factor, YarnBlend blend, int64_t i) {
  const Real ramp = std::clamp((static_cast<Real>(i) - static_cast<Real>(blend.begin)) /
                                   static_cast<Real>(blend.end - blend.begin),
                               Real{0}, Real{1});
  const Real kept = Real{1} - ramp;
  return Real{1} / (factor * tokens_per_radian) * (Real{1} - kept) + frequency * kept;
}

template <typename Real>
std::vector<double> Frequencies(const RopeConfig& config, int64_t head_dim) {
  const auto* llama3 = std::get_if<RopeConfig::Llama3Scaling>(&config.scaling);
  const auto* linear = std::get_if<RopeConfig::LinearScaling>(&config.scaling);
  const auto* dynamic = std::get_if<RopeConfig::DynamicNtkScaling>(&config.scaling);
  const auto* yarn = std::get_if<RopeConfig::YarnScaling>(&config.scaling);
  const Real theta = dynamic != nullptr ? DynamicTheta<Real>(config.theta, *dynamic, head_dim)
                                        : static_cast<Real>(config.theta);
  const YarnBlend blend =
      yarn != nullptr ? YarnBlendOf(config.theta, *yarn, head_dim) : YarnBlend{};
  std::vector<double> frequencies(head_dim / 2);
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const Real exponent = static_cast<Real>(2 * i) / static_cast<Real>(head_dim);
    const Real tokens_per_radian = std::pow(theta, exponent);
    Real frequency = Real{1} / tokens_per_radian;
    if (llama3 != nullptr) frequency = Llama3Scaled(frequency, *llama3);
    if (linear != nullptr) frequency /= static_cast<Real>(linear->factor);
    if (yarn != nullptr) {
      frequency =
          YarnScaled(frequency, tokens_per_radian, static_cast<Real>(yarn->factor), blend, i);
    }
    frequencies[i] = frequency;
  }
  return frequencies;
}

}  // namespace

std::vector<double> RopeInverseFrequencies(const RopeConfig& config, int64_t head_dim) {
  return config.hf_parity ? Frequencies<float>(config, head_dim)
                          : Frequencies<double>(config, head_dim);
}

double RopeMagnitude(const RopeConfig& config) {
  const auto* yarn = std::get_if<RopeConfig::YarnScaling>(&config.scaling);
  return yarn != nullptr ? yarn->attention_factor : 1.0;
}

}  // namespace upipe::kernels
