#include "engine/model/model_config.h"

namespace upipe::model {
namespace {

using kernels::RopeConfig;

RopeConfig::Scaling ScalingOf(const v1::RopeSpec& rope, int64_t context) {
  if (rope.has_llama3()) {
    const auto& s = rope.llama3();
    return RopeConfig::Llama3Scaling{.factor = s.factor(),
                                     .low_freq_factor = s.low_freq_factor(),
                                     .high_freq_factor = s.high_freq_factor(),
                                     .original_context = s.original_context()};
  }
  if (rope.has_linear()) return RopeConfig::LinearScaling{.factor = rope.linear().factor()};
  if (rope.has_dynamic()) {
    const auto& s = rope.dynamic();
    return RopeConfig::DynamicNtkScaling{
        .factor = s.factor(), .original_context = s.original_context(), .context = context};
  }
  if (rope.has_yarn()) {
    const auto& s = rope.yarn();
    return RopeConfig::YarnScaling{.factor = s.factor(),
                                   .original_context = s.original_context(),
                                   .beta_fast = s.beta_fast(),
                                   .beta_slow = s.beta_slow(),
                                   .attention_factor = s.attention_factor(),
                                   .truncate = s.truncate()};
  }
  return std::monostate();
}

}  // namespace

ModelConfig ModelConfig::From(const v1::ModelSpec& spec, int64_t context) {
  return {
      .vocab_size = spec.vocab_size(),
      .hidden_size = spec.hidden_size(),
      .num_layers = spec.num_layers(),
      .num_heads = spec.num_heads(),
      .num_kv_heads = spec.num_kv_heads(),
      .head_dim = spec.head_dim(),
      .intermediate_size = spec.intermediate_size(),
      .rms_norm_eps = static_cast<float>(spec.rms_norm_eps()),
      .tie_embeddings = spec.tie_embeddings(),
      .qk_norm = spec.qk_norm(),
      .qkv_bias = spec.qkv_bias(),
      .rope = {.theta = spec.rope().theta(),
               .scaling = ScalingOf(spec.rope(), context),
               .hf_parity = spec.rope().hf_parity()},
      .causal = spec.causal(),
      .window = spec.has_window() ? std::optional<int64_t>(spec.window()) : std::nullopt,
      .init_stddev = spec.init_stddev(),
  };
}

kernels::DType StorageTypeOf(const v1::TrainSpec& spec) {
  return spec.dtype() == v1::DTYPE_BF16 ? kernels::DType::kBFloat16 : kernels::DType::kFloat32;
}

}  // namespace upipe::model
