#include "kernels/api/validate_rope.h"

#include <cmath>
#include <variant>

namespace upipe::kernels {
namespace {

void CheckFactor(const char* field, double factor, ParamCheck& check) {
  check.Scalar(std::isfinite(factor) && factor >= 1, field, factor, "finite and >= 1");
}

void CheckTokens(const char* field, int64_t tokens, ParamCheck& check) {
  check.Scalar(tokens >= 1, field, tokens, ">= 1");
}

void CheckScaling(const std::monostate&, const RopeConfig&, int64_t, ParamCheck&) {}

void CheckScaling(const RopeConfig::Llama3Scaling& scaling, const RopeConfig&, int64_t,
                  ParamCheck& check) {
  CheckFactor("llama3.factor", scaling.factor, check);
  check.Scalar(scaling.low_freq_factor > 0, "llama3.low_freq_factor", scaling.low_freq_factor,
               "> 0");
  check.Scalar(
      std::isfinite(scaling.high_freq_factor) && scaling.high_freq_factor > scaling.low_freq_factor,
      "llama3.high_freq_factor", scaling.high_freq_factor,
      "finite and > low_freq_factor = ", scaling.low_freq_factor);
  CheckTokens("llama3.original_context", scaling.original_context, check);
}

void CheckScaling(const RopeConfig::LinearScaling& scaling, const RopeConfig&, int64_t,
                  ParamCheck& check) {
  CheckFactor("linear.factor", scaling.factor, check);
}

void CheckScaling(const RopeConfig::DynamicNtkScaling& scaling, const RopeConfig&, int64_t head_dim,
                  ParamCheck& check) {
  CheckFactor("dynamic.factor", scaling.factor, check);
  CheckTokens("dynamic.original_context", scaling.original_context, check);
  CheckTokens("dynamic.context", scaling.context, check);
  check.Scalar(head_dim > 2, "head_dim", head_dim, "> 2 with dynamic scaling");
}

void CheckScaling(const RopeConfig::YarnScaling& scaling, const RopeConfig& config, int64_t,
                  ParamCheck& check) {
  CheckFactor("yarn.factor", scaling.factor, check);
  CheckTokens("yarn.original_context", scaling.original_context, check);
  check.Scalar(scaling.beta_slow > 0, "yarn.beta_slow", scaling.beta_slow, "> 0");
  check.Scalar(std::isfinite(scaling.beta_fast) && scaling.beta_fast > scaling.beta_slow,
               "yarn.beta_fast", scaling.beta_fast, "finite and > beta_slow = ", scaling.beta_slow);
  check.Scalar(std::isfinite(scaling.attention_factor) && scaling.attention_factor > 0,
               "yarn.attention_factor", scaling.attention_factor, "finite and > 0");
  check.Scalar(config.theta > 1, "theta", config.theta, "> 1 with yarn scaling");
}

}  // namespace

void CheckRopeConfig(const RopeConfig& config, int64_t head_dim, ParamCheck& check) {
  check.Scalar(std::isfinite(config.theta) && config.theta > 0, "theta", config.theta,
               "finite and > 0");
  std::visit([&](const auto& scaling) { CheckScaling(scaling, config, head_dim, check); },
             config.scaling);
}

}  // namespace upipe::kernels
