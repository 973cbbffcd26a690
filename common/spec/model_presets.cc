#include "common/spec/model_presets.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/spec/scalar_field.h"
#include "common/utf8.h"

namespace upipe {
namespace {

struct Shape {
  int64_t vocab_size;
  int64_t hidden_size;
  int64_t num_layers;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t intermediate_size;
};

v1::ModelSpec Model(const Shape& shape) {
  v1::ModelSpec model;
  model.set_vocab_size(shape.vocab_size);
  model.set_hidden_size(shape.hidden_size);
  model.set_num_layers(shape.num_layers);
  model.set_num_heads(shape.num_heads);
  model.set_num_kv_heads(shape.num_kv_heads);
  model.set_head_dim(shape.head_dim);
  model.set_intermediate_size(shape.intermediate_size);
  return model;
}

v1::ModelSpec Llama3(const Shape& shape) {
  v1::ModelSpec model = Model(shape);
  model.set_rms_norm_eps(1e-5);
  model.set_tie_embeddings(false);
  model.mutable_rope()->set_theta(500000);
  model.set_max_position(8192);
  return model;
}

// 3.1 and 3.2: trained on to 128K with scaled frequencies.
v1::ModelSpec Llama31(const Shape& shape, double factor, bool tie_embeddings) {
  v1::ModelSpec model = Llama3(shape);
  model.set_tie_embeddings(tie_embeddings);
  v1::Llama3RopeScaling& scaling = *model.mutable_rope()->mutable_llama3();
  scaling.set_factor(factor);
  scaling.set_low_freq_factor(1);
  scaling.set_high_freq_factor(4);
  scaling.set_original_context(8192);
  model.set_max_position(131072);
  return model;
}

v1::ModelSpec Qwen(const Shape& shape, bool tie_embeddings, int64_t max_position) {
  v1::ModelSpec model = Model(shape);
  model.set_rms_norm_eps(1e-6);
  model.set_tie_embeddings(tie_embeddings);
  model.mutable_rope()->set_theta(1000000);
  model.set_max_position(max_position);
  return model;
}

v1::ModelSpec Qwen25(const Shape& shape, bool tie_embeddings, int64_t max_position) {
  v1::ModelSpec model = Qwen(shape, tie_embeddings, max_position);
  model.set_qkv_bias(true);
  return model;
}

v1::ModelSpec Qwen3(const Shape& shape, bool tie_embeddings) {
  v1::ModelSpec model = Qwen(shape, tie_embeddings, 40960);
  model.set_qk_norm(true);
  return model;
}

v1::ModelSpec Mistral(const Shape& shape) {
  v1::ModelSpec model = Model(shape);
  model.set_rms_norm_eps(1e-5);
  model.set_tie_embeddings(false);
  model.mutable_rope()->set_theta(1000000);
  model.set_max_position(32768);
  return model;
}

// Bytes as tokens. 0.02 is for wide models: at these widths tokens would stay alike for long.
v1::ModelSpec Small(const Shape& shape, double init_stddev) {
  v1::ModelSpec model = Model(shape);
  model.set_init_stddev(init_stddev);
  return model;
}

// Shape: vocabulary, d, layers, H, K, D, F.
std::vector<PresetInfo> MakePresets() {
  constexpr const char* kLaptop = "byte vocabulary, for a laptop";
  return {
      {"tiny", kLaptop, Small({257, 128, 2, 8, 2, 16, 352}, 0.06)},
      {"small", kLaptop, Small({257, 256, 4, 8, 2, 32, 704}, 0.04)},
      {"medium", kLaptop, Small({257, 512, 8, 8, 2, 64, 1408}, 0.03)},
      {"llama3-8b", "Meta Llama 3 8B", Llama3({128256, 4096, 32, 32, 8, 128, 14336})},
      {"llama3-70b", "Meta Llama 3 70B", Llama3({128256, 8192, 80, 64, 8, 128, 28672})},
      {"llama3.1-8b", "Meta Llama 3.1 8B, RoPE scaled to 128K",
       Llama31({128256, 4096, 32, 32, 8, 128, 14336}, 8, false)},
      {"llama3.1-70b", "Meta Llama 3.1 70B, RoPE scaled to 128K",
       Llama31({128256, 8192, 80, 64, 8, 128, 28672}, 8, false)},
      {"llama3.2-1b", "Meta Llama 3.2 1B, RoPE scaled to 128K",
       Llama31({128256, 2048, 16, 32, 8, 64, 8192}, 32, true)},
      {"llama3.2-3b", "Meta Llama 3.2 3B, RoPE scaled to 128K",
       Llama31({128256, 3072, 28, 24, 8, 128, 8192}, 32, true)},
      {"qwen2.5-0.5b", "Qwen2.5 0.5B, q/k/v biases",
       Qwen25({151936, 896, 24, 14, 2, 64, 4864}, true, 32768)},
      {"qwen2.5-1.5b", "Qwen2.5 1.5B, q/k/v biases",
       Qwen25({151936, 1536, 28, 12, 2, 128, 8960}, true, 131072)},
      {"qwen2.5-7b", "Qwen2.5 7B, q/k/v biases",
       Qwen25({152064, 3584, 28, 28, 4, 128, 18944}, false, 131072)},
      {"qwen3-0.6b", "Qwen3 0.6B, q/k-norm", Qwen3({151936, 1024, 28, 16, 8, 128, 3072}, true)},
      {"qwen3-1.7b", "Qwen3 1.7B, q/k-norm", Qwen3({151936, 2048, 28, 16, 8, 128, 6144}, true)},
      {"qwen3-4b", "Qwen3 4B, q/k-norm", Qwen3({151936, 2560, 36, 32, 8, 128, 9728}, true)},
      {"qwen3-8b", "Qwen3 8B, q/k-norm", Qwen3({151936, 4096, 36, 32, 8, 128, 12288}, false)},
      {"qwen3-14b", "Qwen3 14B, q/k-norm", Qwen3({151936, 5120, 40, 40, 8, 128, 17408}, false)},
      {"qwen3-32b", "Qwen3 32B, q/k-norm", Qwen3({151936, 5120, 64, 64, 8, 128, 25600}, false)},
      {"mistral-7b-v0.3", "Mistral 7B v0.3, no window",
       Mistral({32768, 4096, 32, 32, 8, 128, 14336})},
  };
}

}  // namespace

const std::vector<PresetInfo>& ModelPresets() {
  static const auto* presets = new std::vector<PresetInfo>(MakePresets());
  return *presets;
}

absl::StatusOr<v1::ModelSpec> ModelPreset(absl::string_view name) {
  std::vector<std::string> names;
  for (const PresetInfo& preset : ModelPresets()) {
    if (preset.name == name) return preset.model;
    names.push_back(preset.name);
  }
  return absl::NotFoundError(
      absl::StrCat("'", ToUtf8(name, 80), "' is unknown", NearestName(name, names)));
}

int64_t ParameterCount(const v1::ModelSpec& model) {
  const int64_t width = model.hidden_size();
  const int64_t q_width = model.num_heads() * model.head_dim();
  const int64_t qkv_width = q_width + 2 * model.num_kv_heads() * model.head_dim();
  int64_t block = 2 * width;                       // two norms
  block += width * qkv_width + q_width * width;    // q, k, v and output projection
  block += 3 * width * model.intermediate_size();  // gate, up, down
  if (model.qkv_bias()) block += qkv_width;
  if (model.qk_norm()) block += 2 * model.head_dim();
  const int64_t embeddings = (model.tie_embeddings() ? 1 : 2) * model.vocab_size() * width;
  return embeddings + model.num_layers() * block + width;  // and the last norm
}

}  // namespace upipe
