#include "engine/model/model_config.h"

namespace upipe::model {

ModelConfig ModelConfig::From(const v1::ModelSpec& spec) {
  ModelConfig config{
      .vocab_size = spec.vocab_size(),
      .hidden_size = spec.hidden_size(),
      .num_layers = spec.num_layers(),
      .num_heads = spec.num_heads(),
      .num_kv_heads = spec.num_kv_heads(),
      .head_dim = spec.head_dim(),
      .intermediate_size = spec.intermediate_size(),
      .rms_norm_eps = static_cast<float>(spec.rms_norm_eps()),
      .tie_embeddings = spec.tie_embeddings(),
      .rope = {.theta = spec.rope().theta(), .llama3 = {}, .hf_parity = spec.rope().hf_parity()},
      .init_stddev = spec.init_stddev(),
  };
  if (spec.rope().has_llama3()) {
    const auto& scaling = spec.rope().llama3();
    config.rope.llama3 =
        kernels::RopeConfig::Llama3Scaling{.factor = scaling.factor(),
                                           .low_freq_factor = scaling.low_freq_factor(),
                                           .high_freq_factor = scaling.high_freq_factor(),
                                           .original_context = scaling.original_context()};
  }
  return config;
}

}  // namespace upipe::model
