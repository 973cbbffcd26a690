#include "common/spec/hf_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/json_section.h"

namespace upipe {
namespace {

using nlohmann::json;

// One model_type: what transformers takes for absent keys, and what the type itself implies.
struct Family {
  const char* model_type;
  const char* architecture;
  int64_t vocab_size;
  int64_t intermediate_size;
  int64_t num_kv_heads;  // 0: as many as heads
  int64_t head_dim;      // 0: hidden_size / heads
  int64_t max_position;
  bool qkv_bias;
  bool qk_norm;
  enum { kNoWindow, kWindow, kSwitchedWindow } window;
};

constexpr std::array<Family, 4> kFamilies = {{
    {"llama", "LlamaForCausalLM", 32000, 11008, 0, 0, 2048, false, false, Family::kNoWindow},
    {"mistral", "MistralForCausalLM", 32000, 14336, 8, 0, 131072, false, false, Family::kWindow},
    {"qwen2", "Qwen2ForCausalLM", 151936, 22016, 32, 0, 32768, true, false,
     Family::kSwitchedWindow},
    {"qwen3", "Qwen3ForCausalLM", 151936, 22016, 32, 128, 32768, false, true,
     Family::kSwitchedWindow},
}};
constexpr int64_t kAbsentHiddenSize = 4096;
constexpr int64_t kAbsentLayers = 32;
constexpr int64_t kAbsentHeads = 32;
constexpr int64_t kAbsentWindow = 4096;
constexpr double kAbsentTheta = 10000;
constexpr char kFullLayers[] = "full_attention";
constexpr char kSlidingLayers[] = "sliding_attention";

// Keys of published files that say nothing about the mathematics of training.
const std::vector<absl::string_view>& HarmlessKeys() {
  static const auto* keys = new std::vector<absl::string_view>{"_attn_implementation",
                                                               "_commit_hash",
                                                               "_name_or_path",
                                                               "attn_implementation",
                                                               "bos_token_id",
                                                               "dtype",
                                                               "eos_token_id",
                                                               "id2label",
                                                               "is_llama_config",
                                                               "label2id",
                                                               "max_sequence_length",
                                                               "name_or_path",
                                                               "output_attentions",
                                                               "output_hidden_states",
                                                               "pad_token_id",
                                                               "pretraining_tp",
                                                               "return_dict",
                                                               "sep_token_id",
                                                               "tokenizer_class",
                                                               "torch_dtype",
                                                               "transformers.js_config",
                                                               "transformers_version",
                                                               "unk_token_id",
                                                               "use_cache"};
  return *keys;
}

const char* FamilyNames() { return "llama, mistral, qwen2, qwen3"; }

// The family `model_type` names; nullptr after saying why not.
const Family* FindFamily(JsonSection& root) {
  const std::string type = root.Text("model_type", "");
  for (const Family& family : kFamilies) {
    if (type == family.model_type) return &family;
  }
  const bool experts = absl::StrContains(type, "moe") || type == "mixtral" ||
                       absl::StartsWith(type, "deepseek") || type == "gpt_oss";
  root.Fail("model_type",
            type.empty()
                ? absl::StrCat("is required: one of ", FamilyNames())
                : absl::StrCat(ShownJson(json(type)),
                               experts ? " is a mixture of experts, which this version does not "
                                         "compute; supported: "
                                       : " is not supported; supported: ",
                               FamilyNames()));
  return nullptr;
}

void ReadSizes(const Family& family, JsonSection& root, v1::ModelSpec& model) {
  model.set_vocab_size(root.Size("vocab_size", family.vocab_size));
  model.set_hidden_size(root.Size("hidden_size", kAbsentHiddenSize));
  model.set_num_layers(root.Size("num_hidden_layers", kAbsentLayers));
  model.set_num_heads(root.Size("num_attention_heads", kAbsentHeads));
  const bool as_heads = family.num_kv_heads == 0 || root.IsNull("num_key_value_heads");
  model.set_num_kv_heads(
      root.Size("num_key_value_heads", as_heads ? model.num_heads() : family.num_kv_heads));
  model.set_intermediate_size(root.Size("intermediate_size", family.intermediate_size));
  const bool divided = family.head_dim == 0 || root.IsNull("head_dim");
  if (root.Find("head_dim") == nullptr && divided && model.hidden_size() % model.num_heads() != 0) {
    root.Fail("head_dim",
              absl::StrCat("is absent, and hidden_size ", model.hidden_size(),
                           " does not divide by num_attention_heads ", model.num_heads()));
  }
  model.set_head_dim(
      root.Size("head_dim", divided ? model.hidden_size() / model.num_heads() : family.head_dim));
}

// The kind every layer has that the file lists; nothing where it lists none, or after saying what
// is wrong with the list.
std::optional<std::string> ListedLayers(JsonSection& root, int64_t num_layers) {
  const json* layers = root.Find("layer_types");
  if (layers == nullptr) return std::nullopt;
  if (!layers->is_array() || static_cast<int64_t>(layers->size()) != num_layers) {
    root.Fail("layer_types",
              absl::StrCat("is no list of num_hidden_layers ", num_layers, " kinds of layers"));
    return std::nullopt;
  }
  for (const json& layer : *layers) {
    if (layer != json(kFullLayers) && layer != json(kSlidingLayers)) {
      root.Fail("layer_types", absl::StrCat("has ", ShownJson(layer), "; full_attention and ",
                                            "sliding_attention are supported"));
      return std::nullopt;
    }
    if (layer != layers->front()) {
      root.Fail("layer_types",
                absl::StrCat("has ", ShownJson(layers->front()), " and ", ShownJson(layer),
                             "; layers of different kinds are ", "not supported"));
      return std::nullopt;
    }
  }
  return layers->front().get<std::string>();
}

// Qwen: layers from max_window_layers on see a window, when it is switched on.
void ReadSwitchedWindow(JsonSection& root, const std::optional<std::string>& listed,
                        v1::ModelSpec& model) {
  const bool on = root.Flag("use_sliding_window", false);
  const int64_t window = root.Size("sliding_window", kAbsentWindow);
  const json* first = root.Find("max_window_layers");
  if (first != nullptr && !first->is_number_unsigned()) {
    root.Fail("max_window_layers", absl::StrCat(ShownJson(*first), " is no number of layers"));
    return;
  }
  if (!on || listed == kFullLayers || root.IsNull("sliding_window")) return;
  uint64_t full_layers = first == nullptr ? 28 : first->get<uint64_t>();
  if (listed == kSlidingLayers) full_layers = 0;  // the list is what counts where there is one
  if (full_layers >= static_cast<uint64_t>(model.num_layers())) return;
  if (full_layers == 0) {
    model.set_window(window);
    return;
  }
  root.Fail("use_sliding_window",
            absl::StrCat("layers from max_window_layers ", full_layers,
                         " on would see a window of ", window,
                         " positions and the others all; layers of different kinds are not "
                         "supported"));
}

void ReadWindow(const Family& family, JsonSection& root, v1::ModelSpec& model) {
  const std::optional<std::string> listed = ListedLayers(root, model.num_layers());
  if (family.window == Family::kSwitchedWindow) ReadSwitchedWindow(root, listed, model);
  if (family.window != Family::kWindow) return;
  const int64_t window = root.Size("sliding_window", kAbsentWindow);
  if (root.IsNull("sliding_window")) return;
  if (listed == kFullLayers) {
    root.Fail("layer_types", absl::StrCat("says full_attention and sliding_window is ", window,
                                          "; set sliding_window to null if there is none"));
  }
  model.set_window(window);
}

// What the RoPE section of the file shares with its root.
struct RopeBase {
  int64_t max_position = 0;
  double theta = 0;              // written outside the section
  int64_t original_context = 0;  // written outside the section; 0: absent
};

// As transformers: the root's value, else the section's, else the longest position.
int64_t OriginalContext(const RopeBase& base, JsonSection& rope) {
  constexpr const char* kKey = "original_max_position_embeddings";
  const int64_t inside = rope.Size(kKey, 0);
  if (base.original_context != 0 && inside != 0 && inside != base.original_context) {
    rope.Fail(kKey, absl::StrCat(inside, " differs from the file's own ", base.original_context));
  }
  if (base.original_context != 0) return base.original_context;
  return inside != 0 ? inside : base.max_position;
}

double RequiredFactor(JsonSection& rope, const char* key = "factor") {
  if (rope.Find(key) == nullptr) rope.Fail(key, "is required by this kind of scaling");
  return rope.Positive(key, 1);
}

void ReadLlama3(const RopeBase& base, JsonSection& rope, v1::Llama3RopeScaling& llama3) {
  llama3.set_factor(RequiredFactor(rope));
  llama3.set_low_freq_factor(RequiredFactor(rope, "low_freq_factor"));
  llama3.set_high_freq_factor(RequiredFactor(rope, "high_freq_factor"));
  llama3.set_original_context(OriginalContext(base, rope));
}

void ReadDynamic(const RopeBase& base, JsonSection& rope, v1::DynamicNtkRopeScaling& dynamic) {
  constexpr const char* kKey = "original_max_position_embeddings";
  dynamic.set_factor(RequiredFactor(rope));
  dynamic.set_original_context(base.max_position);
  for (const int64_t original : {rope.Size(kKey, base.max_position), base.original_context}) {
    if (original == 0 || original == base.max_position) continue;
    rope.Fail(kKey, absl::StrCat("is ", original, ", and dynamic scaling begins at ",
                                 "max_position_embeddings ", base.max_position,
                                 ": the two must be equal"));
  }
}

void ReadYarn(const RopeBase& base, JsonSection& rope, v1::YarnRopeScaling& yarn) {
  yarn.set_factor(RequiredFactor(rope));
  yarn.set_original_context(OriginalContext(base, rope));
  yarn.set_beta_fast(rope.Positive("beta_fast", 32));
  yarn.set_beta_slow(rope.Positive("beta_slow", 1));
  // transformers takes null for false here, and absent for true.
  if (rope.IsNull("truncate")) rope.Fail("truncate", "is null; write true or false");
  yarn.set_truncate(rope.Flag("truncate", true));
  const bool one = rope.Find("mscale") != nullptr;
  const bool all = rope.Find("mscale_all_dim") != nullptr;
  const double mscale = rope.Positive("mscale", 1);
  const double mscale_all_dim = rope.Positive("mscale_all_dim", 1);
  if (rope.Find("attention_factor") != nullptr) {
    yarn.set_attention_factor(rope.Positive("attention_factor", 1));
  } else if (one != all) {
    rope.Fail(one ? "mscale" : "mscale_all_dim",
              "is given without its counterpart of mscale and mscale_all_dim; write "
              "attention_factor");
  } else if (one) {
    const double log_factor = 0.1 * std::log(std::max(1.0, yarn.factor()));
    yarn.set_attention_factor((mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1));
  }
}

void ReadScaling(const RopeBase& base, JsonSection& rope, v1::RopeSpec& spec) {
  const std::string old_type = rope.Text("type", "default");
  const std::string type = rope.Text("rope_type", old_type);
  if (rope.Find("type") != nullptr && old_type != type) {
    rope.Fail("type", absl::StrCat(ShownJson(json(old_type)), " differs from rope_type ",
                                   ShownJson(json(type))));
  }
  spec.set_theta(rope.Positive("rope_theta", base.theta));
  rope.MustBe("partial_rotary_factor", 1, "every column of a head is turned");
  if (type == "llama3") {
    ReadLlama3(base, rope, *spec.mutable_llama3());
  } else if (type == "linear") {
    spec.mutable_linear()->set_factor(RequiredFactor(rope));
  } else if (type == "dynamic") {
    ReadDynamic(base, rope, *spec.mutable_dynamic());
  } else if (type == "yarn") {
    ReadYarn(base, rope, *spec.mutable_yarn());
  } else if (type != "default") {
    rope.Fail(rope.Find("rope_type") != nullptr ? "rope_type" : "type",
              absl::StrCat(ShownJson(json(type)), " is not supported; supported: default, llama3, ",
                           "linear, dynamic, yarn"));
    return;
  }
  rope.RefuseTheRest();
}

void ReadRope(JsonSection& root, v1::ModelSpec& model, std::vector<Violation>& violations) {
  const RopeBase base = {.max_position = model.max_position(),
                         .theta = root.Positive("rope_theta", kAbsentTheta),
                         .original_context = root.Size("original_max_position_embeddings", 0)};
  v1::RopeSpec& rope = *model.mutable_rope();
  rope.set_theta(base.theta);
  const json* scaling = nullptr;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* section = root.Find(key);
    if (section == nullptr || section->empty()) continue;
    if (!section->is_object()) {
      root.Fail(key, absl::StrCat(ShownJson(*section), " is no object of keys and values"));
    } else if (scaling != nullptr) {
      root.Fail(key, "is given beside rope_scaling; keep one");
    } else {
      scaling = section;
      JsonSection keys(*scaling, key, violations);
      ReadScaling(base, keys, rope);
    }
  }
}

// Keys that would change the mathematics at any value but one.
void CheckFixedKeys(const Family& family, JsonSection& root) {
  const std::string act = root.Text("hidden_act", "silu");
  if (act != "silu" && act != "swish") {
    root.Fail("hidden_act", absl::StrCat(ShownJson(json(act)), " is not supported; only silu is"));
  }
  const json* architectures = root.Find("architectures");
  if (architectures != nullptr && *architectures != json::array({family.architecture})) {
    const bool one = architectures->is_array() && architectures->size() == 1;
    root.Fail("architectures", absl::StrCat(one ? ShownJson(architectures->front()) : "a list",
                                            " is not ", family.architecture));
  }
  root.MustBe("attention_dropout", 0, "dropout is not supported");
  if (family.qkv_bias) {
    if (root.Find("attention_bias") != nullptr) {
      root.Fail("attention_bias",
                "has no meaning here: qwen2 always has biases on q, k and v and "
                "none on the output; remove it");
    }
  } else {
    root.MustBe("attention_bias", false,
                "biases on q, k, v and the output projection are not supported; those of qwen2, on "
                "q, k and v, are");
  }
  root.MustBe("mlp_bias", false, "biases of the MLP are not supported");
  root.MustBe("partial_rotary_factor", 1, "every column of a head is turned");
  root.MustBe("rope_interleaved", false, "columns are paired across halves of a head");
  root.MustBe("use_mrope", false, "positions of several dimensions are not supported");
  root.MustBe("is_encoder_decoder", false, "only decoders are supported");
  root.MustBe("add_cross_attention", false, "only decoders are supported");
  if (root.Find("quantization_config") != nullptr) {
    root.Fail("quantization_config", "quantized weights are not supported");
  }
  if (root.Find("auto_map") != nullptr) {
    root.Fail("auto_map", "names code of its own, which may change the mathematics");
  }
}

}  // namespace

std::vector<Violation> ReadHfConfig(absl::string_view text, v1::ModelSpec& model) {
  model.Clear();
  std::vector<Violation> violations;
  if (text.size() > kMaxHfConfigBytes) {
    return {{"", absl::StrCat("has more than the ", kMaxHfConfigBytes,
                              " bytes a config.json may "
                              "have")}};
  }
  json object;
  if (!ParseJsonObject(text, object, violations)) return violations;
  JsonSection root(object, "", violations);
  const Family* family = FindFamily(root);
  if (family == nullptr) return violations;
  root.Ignore(HarmlessKeys());
  ReadSizes(*family, root, model);
  model.set_max_position(root.Size("max_position_embeddings", family->max_position));
  model.set_rms_norm_eps(root.Positive("rms_norm_eps", 1e-6));
  model.set_tie_embeddings(root.Flag("tie_word_embeddings", false));
  model.set_init_stddev(root.Positive("initializer_range", 0.02));
  model.set_qk_norm(family->qk_norm);
  model.set_qkv_bias(family->qkv_bias);
  ReadWindow(*family, root, model);
  ReadRope(root, model, violations);
  CheckFixedKeys(*family, root);
  root.RefuseTheRest();
  return violations;
}

}  // namespace upipe
