#include "engine/model/parameters.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"
#include "xxhash.h"

namespace upipe::model {
namespace {

// Alignment of a tensor in its unit, elements.
constexpr int64_t kTensorAlignment = 16;

void Add(ParameterUnit& unit, std::string name, std::vector<int64_t> shape, double stddev,
         double value = 1) {
  ParameterTensor tensor{.name = std::move(name),
                         .shape = std::move(shape),
                         .offset = unit.num_elements,
                         .num_elements = 1,
                         .init_stddev = stddev,
                         .init_value = value};
  for (int64_t dim : tensor.shape) tensor.num_elements *= dim;
  unit.num_elements = RoundUp(unit.num_elements + tensor.num_elements, kTensorAlignment);
  unit.tensors.push_back(std::move(tensor));
}

ParameterUnit MakeBlock(const ModelConfig& c, int64_t layer) {
  const double out_stddev = c.init_stddev / std::sqrt(2.0 * static_cast<double>(c.num_layers));
  ParameterUnit unit{.name = absl::StrCat("block.", layer), .tensors = {}};
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  Add(unit, prefix + "input_layernorm.weight", {c.hidden_size}, 0);
  const auto project = [&](const std::string& name, int64_t heads) {
    Add(unit, absl::StrCat(prefix, "self_attn.", name, ".weight"),
        {heads * c.head_dim, c.hidden_size}, c.init_stddev);
    if (!c.qkv_bias) return;
    Add(unit, absl::StrCat(prefix, "self_attn.", name, ".bias"), {heads * c.head_dim}, 0, 0);
  };
  project("q_proj", c.num_heads);
  project("k_proj", c.num_kv_heads);
  project("v_proj", c.num_kv_heads);
  Add(unit, prefix + "self_attn.o_proj.weight", {c.hidden_size, c.num_heads * c.head_dim},
      out_stddev);
  if (c.qk_norm) {
    Add(unit, prefix + "self_attn.q_norm.weight", {c.head_dim}, 0);
    Add(unit, prefix + "self_attn.k_norm.weight", {c.head_dim}, 0);
  }
  Add(unit, prefix + "post_attention_layernorm.weight", {c.hidden_size}, 0);
  Add(unit, prefix + "mlp.gate_proj.weight", {c.intermediate_size, c.hidden_size}, c.init_stddev);
  Add(unit, prefix + "mlp.up_proj.weight", {c.intermediate_size, c.hidden_size}, c.init_stddev);
  Add(unit, prefix + "mlp.down_proj.weight", {c.hidden_size, c.intermediate_size}, out_stddev);
  return unit;
}

}  // namespace

const ParameterTensor& ParameterUnit::Find(const std::string& suffix) const {
  auto it = std::find_if(tensors.begin(), tensors.end(),
                         [&](const ParameterTensor& t) { return absl::EndsWith(t.name, suffix); });
  UPIPE_CHECK(it != tensors.end()) << "unit " << name << " has no tensor " << suffix;
  return *it;
}

ParameterLayout ParameterLayout::Make(const ModelConfig& config, int shard_ranks, int dp_ranks) {
  ParameterLayout layout;
  layout.embedding.name = "embedding";
  Add(layout.embedding, "model.embed_tokens.weight", {config.vocab_size, config.hidden_size},
      config.init_stddev);
  for (int64_t layer = 0; layer < config.num_layers; ++layer)
    layout.blocks.push_back(MakeBlock(config, layer));
  layout.head.name = "head";
  Add(config.tie_embeddings ? layout.embedding : layout.head, "model.norm.weight",
      {config.hidden_size}, 0);
  if (!config.tie_embeddings) {
    Add(layout.head, "lm_head.weight", {config.vocab_size, config.hidden_size}, config.init_stddev);
  }
  auto shard = [&](ParameterUnit& unit) {
    for (const ParameterTensor& tensor : unit.tensors) layout.num_parameters += tensor.num_elements;
    unit.shard_elements =
        RoundUp(CeilDiv(unit.num_elements, shard_ranks), kTensorAlignment * dp_ranks);
    unit.num_elements = unit.shard_elements * shard_ranks;
    unit.shard_offset = layout.shard_elements;
    layout.shard_elements += unit.shard_elements;
  };
  shard(layout.embedding);
  for (ParameterUnit& block : layout.blocks) shard(block);
  if (!layout.head.tensors.empty()) shard(layout.head);
  return layout;
}

std::vector<const ParameterUnit*> ParameterLayout::Units() const {
  std::vector<const ParameterUnit*> units = {&embedding};
  for (const ParameterUnit& block : blocks) units.push_back(&block);
  if (!head.tensors.empty()) units.push_back(&head);
  return units;
}

uint64_t TensorId(const std::string& name) { return XXH64(name.data(), name.size(), 0); }

}  // namespace upipe::model
