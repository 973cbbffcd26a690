// Published config.json files, re-typed, each accepted as exactly the model it describes or refused
// for the right key; and what single keys do.
#include "common/spec/hf_config.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/spec/model_presets.h"

namespace upipe {
namespace {

using google::protobuf::util::MessageDifferencer;
using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::filesystem::path Folder() {
  const char* source = std::getenv("UPIPE_SOURCE_DIR");
  EXPECT_NE(source, nullptr) << "run through ctest";
  return std::filesystem::path(source == nullptr ? "." : source) / "tests/unit/common/data/hf";
}

std::string FileText(const std::string& name) {
  std::ifstream file(Folder() / (name + ".json"));
  EXPECT_TRUE(file.is_open()) << name;
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Joined(const std::vector<Violation>& violations) {
  return absl::StrJoin(violations, "\n", [](std::string* out, const Violation& v) {
    absl::StrAppend(out, v.field, ": ", v.message);
  });
}

struct Accepted {
  const char* file;
  int64_t num_parameters;  // of the published model
  const char* sizes;       // vocabulary, d, layers, H, K, D, F
  const char* rest;        // text format; absent flags false, init_stddev 0.02
};

const Accepted kAccepted[] = {
    {"llama-1-7b", 6738415616, "32000 4096 32 32 32 128 11008",
     "rms_norm_eps: 1e-6 rope { theta: 10000 } max_position: 2048"},
    {"llama-2-7b", 6738415616, "32000 4096 32 32 32 128 11008",
     "rms_norm_eps: 1e-5 rope { theta: 10000 } max_position: 4096"},
    {"llama-2-70b", 68976648192, "32000 8192 80 64 8 128 28672",
     "rms_norm_eps: 1e-5 rope { theta: 10000 } max_position: 4096"},
    {"llama-2-7b-dynamic", 6738415616, "32000 4096 32 32 32 128 11008",
     "rms_norm_eps: 1e-5 max_position: 4096 "
     "rope { theta: 10000 dynamic { factor: 4 original_context: 4096 } }"},
    {"code-llama-7b", 6738546688, "32016 4096 32 32 32 128 11008",
     "rms_norm_eps: 1e-5 rope { theta: 1000000 } max_position: 16384"},
    {"llama-3-8b", 8030261248, "128256 4096 32 32 8 128 14336",
     "rms_norm_eps: 1e-5 rope { theta: 500000 } max_position: 8192"},
    {"llama-3-70b", 70553706496, "128256 8192 80 64 8 128 28672",
     "rms_norm_eps: 1e-5 rope { theta: 500000 } max_position: 8192"},
    {"llama-3.1-8b", 8030261248, "128256 4096 32 32 8 128 14336",
     "rms_norm_eps: 1e-5 max_position: 131072 rope { theta: 500000 llama3 { factor: 8 "
     "low_freq_factor: 1 high_freq_factor: 4 original_context: 8192 } }"},
    {"llama-3.2-1b", 1235814400, "128256 2048 16 32 8 64 8192",
     "tie_embeddings: true rms_norm_eps: 1e-5 max_position: 131072 rope { theta: 500000 llama3 { "
     "factor: 32 low_freq_factor: 1 high_freq_factor: 4 original_context: 8192 } }"},
    {"llama-3.2-3b", 3212749824, "128256 3072 28 24 8 128 8192",
     "tie_embeddings: true rms_norm_eps: 1e-5 max_position: 131072 rope { theta: 500000 llama3 { "
     "factor: 32 low_freq_factor: 1 high_freq_factor: 4 original_context: 8192 } }"},
    {"tinyllama-1.1b", 1100048384, "32000 2048 22 32 4 64 5632",
     "rms_norm_eps: 1e-5 rope { theta: 10000 } max_position: 2048"},
    {"smollm2-135m", 134515008, "49152 576 30 9 3 64 1536",
     "tie_embeddings: true rms_norm_eps: 1e-5 init_stddev: 0.041666666666666664 "
     "rope { theta: 100000 } max_position: 8192"},
    {"yi-6b", 6061035520, "64000 4096 32 32 4 128 11008",
     "rms_norm_eps: 1e-5 rope { theta: 5000000 } max_position: 4096"},
    {"deepseek-coder-6.7b", 6740512768, "32256 4096 32 32 32 128 11008",
     "rms_norm_eps: 1e-6 rope { theta: 100000 linear { factor: 4 } } max_position: 16384"},
    {"mistral-7b-v0.1", 7241732096, "32000 4096 32 32 8 128 14336",
     "rms_norm_eps: 1e-5 rope { theta: 10000 } max_position: 32768 window: 4096"},
    {"mistral-7b-v0.3", 7248023552, "32768 4096 32 32 8 128 14336",
     "rms_norm_eps: 1e-5 rope { theta: 1000000 } max_position: 32768"},
    {"mistral-nemo-12b", 12247782400, "131072 5120 40 32 8 128 14336",
     "rms_norm_eps: 1e-5 rope { theta: 1000000 } max_position: 1024000"},
    {"qwen2-7b", 7615616512, "152064 3584 28 28 4 128 18944",
     "rms_norm_eps: 1e-6 qkv_bias: true rope { theta: 1000000 } max_position: 131072"},
    {"qwen2.5-0.5b", 494032768, "151936 896 24 14 2 64 4864",
     "tie_embeddings: true rms_norm_eps: 1e-6 qkv_bias: true rope { theta: 1000000 } "
     "max_position: 32768"},
    {"qwen2.5-7b-instruct", 7615616512, "152064 3584 28 28 4 128 18944",
     "rms_norm_eps: 1e-6 qkv_bias: true rope { theta: 1000000 } max_position: 32768"},
    {"qwen2.5-7b-instruct-yarn", 7615616512, "152064 3584 28 28 4 128 18944",
     "rms_norm_eps: 1e-6 qkv_bias: true max_position: 32768 rope { theta: 1000000 yarn { factor: 4 "
     "original_context: 32768 beta_fast: 32 beta_slow: 1 truncate: true } }"},
    {"qwen2.5-32b", 32763876352, "152064 5120 64 40 8 128 27648",
     "rms_norm_eps: 1e-5 qkv_bias: true rope { theta: 1000000 } max_position: 131072"},
    {"deepseek-r1-distill-qwen-7b", 7615616512, "152064 3584 28 28 4 128 18944",
     "rms_norm_eps: 1e-6 qkv_bias: true rope { theta: 10000 } max_position: 131072"},
    {"qwen3-0.6b", 596049920, "151936 1024 28 16 8 128 3072",
     "tie_embeddings: true rms_norm_eps: 1e-6 qk_norm: true rope { theta: 1000000 } "
     "max_position: 40960"},
    {"qwen3-4b-instruct-2507", 4022468096, "151936 2560 36 32 8 128 9728",
     "tie_embeddings: true rms_norm_eps: 1e-6 qk_norm: true rope { theta: 5000000 } "
     "max_position: 262144"},
    {"qwen3-8b", 8190735360, "151936 4096 36 32 8 128 12288",
     "rms_norm_eps: 1e-6 qk_norm: true rope { theta: 1000000 } max_position: 40960"},
    {"qwen3-8b-transformers-5", 8190735360, "151936 4096 36 32 8 128 12288",
     "rms_norm_eps: 1e-6 qk_norm: true rope { theta: 1000000 } max_position: 40960"},
    {"qwen3-32b", 32762123264, "151936 5120 64 64 8 128 25600",
     "rms_norm_eps: 1e-6 qk_norm: true rope { theta: 1000000 } max_position: 40960"},
};

struct Refused {
  const char* file;
  const char* problems;  // every one, in order
};

constexpr const char* kExperts =
    " is a mixture of experts, which this version does not compute; supported: llama, mistral, "
    "qwen2, qwen3";
constexpr const char* kOther = " is not supported; supported: llama, mistral, qwen2, qwen3";

const Refused kRefusedTypes[] = {
    {"mixtral-8x7b", "mixtral"},     {"qwen3-30b-a3b", "qwen3_moe"},
    {"qwen2-57b-a14b", "qwen2_moe"}, {"deepseek-v2-lite", "deepseek_v2"},
    {"deepseek-v3", "deepseek_v3"},  {"gemma-2-2b", "gemma2"},
    {"phi-3-mini-128k", "phi3"},     {"gpt2", "gpt2"},
    {"pythia-1b", "gpt_neox"},       {"olmo-2-7b", "olmo2"},
    {"command-r-v01", "cohere"},     {"internlm2.5-7b", "internlm2"},
    {"smollm3-3b", "smollm3"},
};

const Refused kRefused[] = {
    {"yarn-llama-2-7b-128k",
     "rope_scaling.finetuned: is not known: it may change the mathematics; remove it if it does "
     "not\n"
     "auto_map: names code of its own, which may change the mathematics"},
    {"qwen2.5-7b-instruct-1m",
     "dual_chunk_attention_config: is not known: it may change the mathematics; remove it if it "
     "does not"},
    {"qwen2.5-7b-instruct-awq", "quantization_config: quantized weights are not supported"},
};

v1::ModelSpec Expected(const Accepted& c) {
  v1::ModelSpec model;
  std::istringstream sizes(c.sizes);
  int64_t n[7] = {};
  for (int64_t& value : n) sizes >> value;
  const std::string text = absl::StrCat(
      "vocab_size: ", n[0], " hidden_size: ", n[1], " num_layers: ", n[2], " num_heads: ", n[3],
      " num_kv_heads: ", n[4], " head_dim: ", n[5], " intermediate_size: ", n[6], " ", c.rest);
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &model)) << text;
  if (!model.has_tie_embeddings()) model.set_tie_embeddings(false);
  if (!model.has_qk_norm()) model.set_qk_norm(false);
  if (!model.has_qkv_bias()) model.set_qkv_bias(false);
  if (!model.has_init_stddev()) model.set_init_stddev(0.02);
  return model;
}

TEST(HfConfig, PublishedFilesAreReadAsTheirModels) {
  for (const Accepted& c : kAccepted) {
    v1::ModelSpec model;
    EXPECT_EQ(Joined(ReadHfConfig(FileText(c.file), model)), "") << c.file;
    EXPECT_TRUE(MessageDifferencer::Equals(model, Expected(c)))
        << c.file << "\n"
        << model.DebugString() << "expected\n"
        << Expected(c).DebugString();
    EXPECT_EQ(ParameterCount(model), c.num_parameters) << c.file;
  }
}

TEST(HfConfig, OtherPublishedFilesAreRefusedByTheKeyThatMatters) {
  v1::ModelSpec model;
  for (const Refused& c : kRefusedTypes) {
    const bool experts = std::string(c.problems).find("moe") != std::string::npos ||
                         std::string(c.problems).find("deepseek") == 0 ||
                         std::string(c.problems) == "mixtral";
    EXPECT_EQ(Joined(ReadHfConfig(FileText(c.file), model)),
              absl::StrCat("model_type: '", c.problems, "'", experts ? kExperts : kOther))
        << c.file;
  }
  for (const Refused& c : kRefused) {
    EXPECT_EQ(Joined(ReadHfConfig(FileText(c.file), model)), c.problems) << c.file;
  }
}

TEST(HfConfig, EveryFileOfTheCorpusHasAnExpectedOutcome) {
  std::set<std::string> expected;
  for (const Accepted& c : kAccepted) expected.insert(c.file);
  for (const Refused& c : kRefusedTypes) expected.insert(c.file);
  for (const Refused& c : kRefused) expected.insert(c.file);
  std::set<std::string> present;
  for (const auto& entry : std::filesystem::directory_iterator(Folder())) {
    present.insert(entry.path().stem().string());
  }
  EXPECT_EQ(present, expected);
}

// The problems of the Qwen3 (or other) file with the keys of `patch` set; null removes nothing.
std::string ProblemsWith(const char* file, const char* patch, v1::ModelSpec* out = nullptr) {
  json config = json::parse(FileText(file));
  config.update(json::parse(patch));
  v1::ModelSpec model;
  const std::string problems = Joined(ReadHfConfig(config.dump(), model));
  if (out != nullptr) *out = model;
  return problems;
}

struct Patch {
  const char* file;
  const char* patch;
  const char* problem;  // the only one, in full or its beginning
};

const Patch kPatches[] = {
    {"qwen3-8b", R"({"num_experts": 128})", "num_experts: is part of a mixture of experts"},
    {"qwen3-8b", R"({"num_experts_per_tok": 8})", "num_experts_per_tok: is part of a mixture"},
    {"llama-3-8b", R"({"num_local_experts": 8})", "num_local_experts: is part of a mixture"},
    {"qwen3-8b", R"({"router_aux_loss_coef": 0.01})", "router_aux_loss_coef: is part of a mix"},
    {"qwen3-8b", R"({"mlp_only_layers": []})", "mlp_only_layers: is part of a mixture"},
    {"qwen3-8b", R"({"num_hidden_layer": 3})",
     "num_hidden_layer: is not known: it may change the mathematics; remove it if it does not; did "
     "you mean 'num_hidden_layers'?"},
    {"qwen3-8b", R"({"hidden_act": "gelu"})", "hidden_act: 'gelu' is not supported; only silu is"},
    {"llama-3-8b", R"({"attention_bias": true})", "attention_bias: is true: biases on q, k, v and"},
    {"qwen3-8b", R"({"attention_bias": true})", "attention_bias: is true: biases on q, k, v and"},
    {"qwen2-7b", R"({"attention_bias": true})", "attention_bias: has no meaning here: qwen2 alw"},
    {"llama-3-8b", R"({"mlp_bias": true})", "mlp_bias: is true: biases of the MLP are not supp"},
    {"llama-3-8b", R"({"attention_dropout": 0.1})", "attention_dropout: is 0.1: dropout is not"},
    {"llama-3-8b", R"({"partial_rotary_factor": 0.5})", "partial_rotary_factor: is 0.5: every"},
    {"llama-3-8b", R"({"architectures": ["LlamaForSequenceClassification"]})",
     "architectures: 'LlamaForSequenceClassification' is not LlamaForCausalLM"},
    {"smollm2-135m", R"({"rope_interleaved": true})", "rope_interleaved: is true: columns are"},
    {"qwen2.5-0.5b", R"({"use_mrope": true})", "use_mrope: is true: positions of several"},
    {"llama-3-8b", R"({"is_encoder_decoder": true})", "is_encoder_decoder: is true: only decod"},
    {"llama-3-8b", R"({"add_cross_attention": true})", "add_cross_attention: is true: only dec"},
    {"llama-3-8b", R"({"sliding_window": 4096})", "sliding_window: is not known"},
    {"llama-3-8b", R"({"head_dim": null, "num_attention_heads": 24})",
     "head_dim: is absent, and hidden_size 4096 does not divide by num_attention_heads 24"},
    {"qwen3-8b", R"({"layer_types": ["full_attention"]})",
     "layer_types: is no list of num_hidden_layers 36 kinds of layers"},
    {"qwen3-8b", R"({"num_hidden_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"]})",
     "layer_types: has 'full_attention' and 'sliding_attention'; layers of different kinds"},
    {"qwen3-8b", R"({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]})",
     "layer_types: has 'chunked_attention'; full_attention and sliding_attention are supported"},
    {"qwen3-8b", R"({"num_hidden_layers": 1, "layer_types": [7]})", "layer_types: has 7; full_"},
    {"mistral-7b-v0.1", R"({"num_hidden_layers": 1, "layer_types": ["full_attention"]})",
     "layer_types: says full_attention and sliding_window is 4096; set sliding_window to null"},
    {"qwen2-7b", R"({"use_sliding_window": true, "max_window_layers": 21})",
     "use_sliding_window: layers from max_window_layers 21 on would see a window of 131072"},
    {"qwen2-7b", R"({"max_window_layers": "all"})", "max_window_layers: 'all' is no number of"},
    {"llama-3.1-8b", R"({"rope_scaling": {"rope_type": "longrope", "short_factor": [1]}})",
     "rope_scaling.rope_type: 'longrope' is not supported; supported: default, llama3, linear"},
    {"llama-3.1-8b", R"({"rope_scaling": {"type": "su", "short_factor": [1]}})",
     "rope_scaling.type: 'su' is not supported"},
    {"llama-3.1-8b", R"({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2}})",
     "rope_scaling.type: 'linear' differs from rope_type 'yarn'"},
    {"llama-3.1-8b", R"({"rope_scaling": {"rope_type": "linear"}})",
     "rope_scaling.factor: is required by this kind of scaling"},
    {"llama-3.1-8b", R"({"rope_scaling": {"rope_type": "llama3", "factor": 8,
        "low_freq_factor": 1, "original_max_position_embeddings": 8192}})",
     "rope_scaling.high_freq_factor: is required by this kind of scaling"},
    {"llama-3.1-8b", R"({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 32}})",
     "rope_scaling.beta_fast: is not known"},
    {"llama-3.1-8b", R"({"rope_scaling": {"type": "default", "factor": 2}})",
     "rope_scaling.factor: is not known"},
    {"llama-2-7b-dynamic", R"({"rope_scaling": {"type": "dynamic", "factor": 2,
        "original_max_position_embeddings": 2048}})",
     "rope_scaling.original_max_position_embeddings: is 2048, and dynamic scaling begins at"},
    {"llama-2-7b-dynamic", R"({"rope_scaling": {"type": "dynamic", "factor": 2, "alpha": 3}})",
     "rope_scaling.alpha: is not known"},
    {"llama-2-7b", R"({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 0.7}})",
     "rope_scaling.mscale: is given without its counterpart"},
    {"llama-2-7b", R"({"rope_scaling": {"type": "yarn", "factor": 2, "mscale_all_dim": 0.7}})",
     "rope_scaling.mscale_all_dim: is given without its counterpart"},
    {"llama-2-7b", R"({"original_max_position_embeddings": 2048, "rope_scaling": {"type": "yarn",
        "factor": 2, "original_max_position_embeddings": 4096}})",
     "rope_scaling.original_max_position_embeddings: 4096 differs from the file's own 2048"},
    {"llama-2-7b", R"({"rope_scaling": {"type": "yarn", "factor": 2,
        "partial_rotary_factor": 0.5}})",
     "rope_scaling.partial_rotary_factor: is 0.5"},
    {"llama-3.1-8b", R"({"rope_parameters": {"rope_type": "default"}})",
     "rope_parameters: is given beside rope_scaling; keep one"},
    {"llama-3.1-8b", R"({"rope_scaling": "linear"})",
     "rope_scaling: 'linear' is no object of keys and values"},
    {"llama-3-8b", R"({"hidden_size": 4096.0})", "hidden_size: 4096.0 is no whole number from 1"},
    {"llama-3-8b", R"({"vocab_size": -1})", "vocab_size: -1 is no whole number from 1 to 2^40"},
    {"llama-3-8b", R"({"vocab_size": 18446744073709551615})",
     "vocab_size: 18446744073709551615 is no whole number from 1 to 2^40"},
    {"llama-3-8b", R"({"tie_word_embeddings": "no"})", "tie_word_embeddings: 'no' is not true or"},
    {"llama-3-8b", R"({"rms_norm_eps": 0})", "rms_norm_eps: 0 is no number above 0"},
    {"llama-3-8b", R"({"rope_theta": [1]})", "rope_theta: a list is no number above 0"},
    {"llama-3-8b", R"({"hidden_act": 5})", "hidden_act: 5 is no text"},
    {"llama-3-8b", R"({"bad\n\u001b\u00e9": 5})", "bad\\n\\033\xc3\xa9: is not known"},
};

TEST(HfConfig, EachUnsupportedKeyIsNamedAlone) {
  for (const Patch& c : kPatches) {
    const std::string problems = ProblemsWith(c.file, c.patch);
    EXPECT_THAT(problems, testing::StartsWith(c.problem)) << c.file << " " << c.patch;
    EXPECT_THAT(problems, testing::Not(HasSubstr("\n"))) << c.file << " " << c.patch;
  }
}

TEST(HfConfig, AllProblemsComeAtOnce) {
  v1::ModelSpec model;
  std::vector<std::string> keys;
  for (const Violation& violation : ReadHfConfig(
           R"({"model_type": "llama", "hidden_act": "relu", "vocab_size": "many", "num_experts": 8,
               "rope_scaling": {"type": "linear", "factor": 0}, "colour": "red", "void": null})",
           model)) {
    keys.push_back(violation.field);
  }
  EXPECT_THAT(keys, ElementsAre("vocab_size", "rope_scaling.factor", "hidden_act", "colour",
                                "num_experts"));
}

// Transformers' own defaults, per model_type.
TEST(HfConfig, AbsentKeysTakeTheDefaultsOfTheirModelType) {
  const auto read = [](const char* text) {
    v1::ModelSpec model;
    EXPECT_EQ(Joined(ReadHfConfig(text, model)), "") << text;
    return model;
  };
  const v1::ModelSpec llama = read(R"({"model_type": "llama", "num_attention_heads": 16})");
  EXPECT_EQ(llama.vocab_size(), 32000);
  EXPECT_EQ(llama.num_kv_heads(), 16);
  EXPECT_EQ(llama.head_dim(), 256);
  EXPECT_EQ(llama.rms_norm_eps(), 1e-6);
  EXPECT_EQ(llama.max_position(), 2048);
  EXPECT_FALSE(llama.has_window());
  EXPECT_EQ(llama.rope().theta(), 10000);
  const v1::ModelSpec mistral = read(R"({"model_type": "mistral"})");
  EXPECT_EQ(mistral.num_kv_heads(), 8);
  EXPECT_EQ(mistral.window(), 4096);
  EXPECT_EQ(mistral.max_position(), 131072);
  const v1::ModelSpec qwen2 = read(R"({"model_type": "qwen2", "hidden_size": 2048})");
  EXPECT_EQ(qwen2.num_kv_heads(), 32);
  EXPECT_EQ(qwen2.head_dim(), 64);
  EXPECT_TRUE(qwen2.qkv_bias());
  const v1::ModelSpec qwen3 = read(R"({"model_type": "qwen3", "hidden_size": 2048})");
  EXPECT_EQ(qwen3.head_dim(), 128);
  EXPECT_EQ(qwen3.intermediate_size(), 22016);
  EXPECT_TRUE(qwen3.qk_norm());
  EXPECT_FALSE(qwen3.qkv_bias());
  EXPECT_EQ(read(R"({"model_type": "qwen2", "num_attention_heads": 8,
                     "num_key_value_heads": null})")
                .num_kv_heads(),
            8);
}

TEST(HfConfig, WindowsAreReadWhereTheyAreComputed) {
  v1::ModelSpec model;
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": true, "max_window_layers": 0,
                                         "sliding_window": 4096})",
                         &model),
            "");
  EXPECT_EQ(model.window(), 4096);
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": true})", &model), "");
  EXPECT_FALSE(model.has_window());  // from layer 28 of 28 on
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": true, "max_window_layers": 0,
                                         "sliding_window": null})",
                         &model),
            "");
  EXPECT_FALSE(model.has_window());
  // A list of layers counts for more than max_window_layers, the switch for more than the list.
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": true, "sliding_window": 4096,
                                         "max_window_layers": 28, "num_hidden_layers": 2,
                                         "layer_types": ["sliding_attention",
                                                         "sliding_attention"]})",
                         &model),
            "");
  EXPECT_EQ(model.window(), 4096);
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": false, "num_hidden_layers": 1,
                                         "layer_types": ["sliding_attention"]})",
                         &model),
            "");
  EXPECT_FALSE(model.has_window());
  EXPECT_EQ(ProblemsWith("qwen2-7b", R"({"use_sliding_window": true, "max_window_layers": 0,
                                         "num_hidden_layers": 1,
                                         "layer_types": ["full_attention"]})",
                         &model),
            "");
  EXPECT_FALSE(model.has_window());
}

TEST(HfConfig, RopeScalingsCarryEveryKey) {
  v1::ModelSpec model;
  EXPECT_EQ(ProblemsWith("llama-2-7b", R"({"rope_parameters": {"rope_type": "yarn", "factor": 16,
      "rope_theta": 2000000, "beta_fast": 24, "beta_slow": 2, "attention_factor": 1.25,
      "truncate": false, "original_max_position_embeddings": null}})",
                         &model),
            "");
  EXPECT_EQ(model.rope().theta(), 2000000);
  EXPECT_EQ(model.rope().yarn().factor(), 16);
  EXPECT_EQ(model.rope().yarn().original_context(), 4096);  // max_position_embeddings
  EXPECT_EQ(model.rope().yarn().beta_fast(), 24);
  EXPECT_EQ(model.rope().yarn().beta_slow(), 2);
  EXPECT_EQ(model.rope().yarn().attention_factor(), 1.25);
  EXPECT_FALSE(model.rope().yarn().truncate());
  EXPECT_EQ(ProblemsWith("llama-2-7b", R"({"original_max_position_embeddings": 2048,
      "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}})",
                         &model),
            "");
  EXPECT_EQ(model.rope().yarn().original_context(), 2048);
  // (0.1 ln 40 + 1) / (0.05 ln 40 + 1)
  EXPECT_NEAR(model.rope().yarn().attention_factor(), 1.3688879454 / 1.1844439727, 1e-9);
}

TEST(HfConfig, TextThatIsNoObjectIsRefused) {
  v1::ModelSpec model;
  EXPECT_THAT(Joined(ReadHfConfig("", model)), HasSubstr(": is no JSON: parse error at line 1"));
  EXPECT_THAT(Joined(ReadHfConfig("{\"a\": 1,}", model)), HasSubstr("is no JSON"));
  EXPECT_THAT(Joined(ReadHfConfig("{\"a\": 1e999}", model)), HasSubstr("is no JSON"));
  EXPECT_THAT(Joined(ReadHfConfig("{\"a\": NaN}", model)), HasSubstr("is no JSON"));
  EXPECT_THAT(Joined(ReadHfConfig("{\"a\xff\": 1}", model)), HasSubstr("is no JSON"));
  EXPECT_EQ(Joined(ReadHfConfig("[1]", model)), ": is no JSON object of keys and values");
  EXPECT_EQ(Joined(ReadHfConfig("{}", model)),
            "model_type: is required: one of llama, mistral, qwen2, qwen3");
  EXPECT_EQ(Joined(ReadHfConfig(R"({"model_type": "llama", "model_type": "qwen3"})", model)),
            "model_type: is given twice");
  EXPECT_THAT(Joined(ReadHfConfig(std::string(kMaxHfConfigBytes + 1, ' '), model)),
              HasSubstr("has more than the 262144 bytes"));
  EXPECT_THAT(Joined(ReadHfConfig(std::string(200000, '['), model)),
              HasSubstr("is nested deeper than 8 levels"));
  EXPECT_THAT(Joined(ReadHfConfig(absl::StrCat(R"({"model_type": "llama", "a": )",
                                               std::string(9, '['), std::string(9, ']'), "}"),
                                  model)),
              HasSubstr("is nested deeper than 8 levels"));
}

}  // namespace
}  // namespace upipe
