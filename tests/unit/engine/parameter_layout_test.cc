// The layout of parameters over ranks: every element of every tensor on exactly one rank, padding
// nowhere counted.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/model_presets.h"
#include "common/spec/model_rules.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/model/sharded_parameters.h"
#include "kernels/device_factory.h"

namespace upipe::model {
namespace {

ModelConfig Config(int64_t d, bool tied) {
  return {.vocab_size = 37,
          .hidden_size = d,
          .num_layers = 2,
          .num_heads = 6,
          .num_kv_heads = 3,
          .head_dim = 2,
          .intermediate_size = 11,
          .tie_embeddings = tied};
}

// Names and shapes of a Hugging Face Llama, Qwen3 (q/k-norm) or Qwen2.5 (biases) checkpoint.
std::map<std::string, std::vector<int64_t>> Checkpoint(const ModelConfig& c) {
  std::map<std::string, std::vector<int64_t>> shapes = {
      {"model.embed_tokens.weight", {c.vocab_size, c.hidden_size}},
      {"model.norm.weight", {c.hidden_size}}};
  if (!c.tie_embeddings) shapes["lm_head.weight"] = {c.vocab_size, c.hidden_size};
  for (int64_t layer = 0; layer < c.num_layers; ++layer) {
    const std::string prefix = absl::StrCat("model.layers.", layer, ".");
    const int64_t query_width = c.num_heads * c.head_dim, kv_width = c.num_kv_heads * c.head_dim;
    shapes[prefix + "input_layernorm.weight"] = {c.hidden_size};
    shapes[prefix + "self_attn.q_proj.weight"] = {query_width, c.hidden_size};
    shapes[prefix + "self_attn.k_proj.weight"] = {kv_width, c.hidden_size};
    shapes[prefix + "self_attn.v_proj.weight"] = {kv_width, c.hidden_size};
    if (c.qkv_bias) {
      shapes[prefix + "self_attn.q_proj.bias"] = {query_width};
      shapes[prefix + "self_attn.k_proj.bias"] = {kv_width};
      shapes[prefix + "self_attn.v_proj.bias"] = {kv_width};
    }
    if (c.qk_norm) {
      shapes[prefix + "self_attn.q_norm.weight"] = {c.head_dim};
      shapes[prefix + "self_attn.k_norm.weight"] = {c.head_dim};
    }
    shapes[prefix + "self_attn.o_proj.weight"] = {c.hidden_size, query_width};
    shapes[prefix + "post_attention_layernorm.weight"] = {c.hidden_size};
    shapes[prefix + "mlp.gate_proj.weight"] = {c.intermediate_size, c.hidden_size};
    shapes[prefix + "mlp.up_proj.weight"] = {c.intermediate_size, c.hidden_size};
    shapes[prefix + "mlp.down_proj.weight"] = {c.hidden_size, c.intermediate_size};
  }
  return shapes;
}

TEST(ParameterLayout, HasTheTensorsOfACheckpoint) {
  for (int variant = 0; variant < 8; ++variant) {
    ModelConfig config = Config(7, (variant & 1) != 0);
    config.qk_norm = (variant & 2) != 0;
    config.qkv_bias = (variant & 4) != 0;
    const auto expected = Checkpoint(config);
    const ParameterLayout layout = ParameterLayout::Make(config, 3);
    std::map<std::string, std::vector<int64_t>> found;
    int64_t elements = 0;
    for (const ParameterUnit* unit : layout.Units()) {
      for (const ParameterTensor& tensor : unit->tensors) {
        EXPECT_TRUE(found.insert({tensor.name, tensor.shape}).second) << tensor.name;
        elements += tensor.num_elements;
        EXPECT_EQ(tensor.decays(), tensor.shape.size() == 2) << tensor.name;
        EXPECT_EQ(tensor.init_stddev == 0, tensor.shape.size() == 1) << tensor.name;
        EXPECT_EQ(tensor.init_value, absl::EndsWith(tensor.name, ".bias") ? 0 : 1) << tensor.name;
      }
    }
    EXPECT_EQ(found, expected);
    EXPECT_EQ(layout.num_parameters, elements);
  }
}

// What common/spec says of a published shape, which knows its parameter count, and what the engine
// allocates.
TEST(ParameterLayout, HasAsManyParametersAsThePresetSays) {
  for (const PresetInfo& preset : ModelPresets()) {
    const ModelConfig config = ModelConfig::From(WithModelDefaults(preset.model), /*context=*/8192);
    EXPECT_EQ(ParameterLayout::Make(config, 8).num_parameters, ParameterCount(preset.model))
        << preset.name;
  }
}

// Elements of each tensor that rank `rank` says it holds are added to `held`.
void CountPieces(const ParameterLayout& layout, int rank, int ranks,
                 std::map<std::string, std::vector<int>>& held) {
  auto device = *kernels::CreateDryDevice("cpu");
  comm::DryCommunicator comm(rank, ranks);
  const auto streams = engine::RankStreams::Create(*device, rank);
  const engine::RankContext context({.device = *device,
                                     .streams = streams,
                                     .comm = comm,
                                     .storage = kernels::DType::kFloat32,
                                     .mesh = {.ulysses_ranks = ranks}});
  auto parameters = ShardedParameters::Create(context, layout, /*seed=*/1, engine::Place::kDevice);
  ASSERT_TRUE(parameters.ok()) << parameters.status();
  int64_t end_of_last = 0;
  for (const auto& piece : (*parameters)->pieces()) {
    ASSERT_GT(piece.count, 0);
    ASSERT_GE(piece.shard_begin, end_of_last) << piece.tensor->name << " overlaps the piece before";
    end_of_last = piece.shard_begin + piece.count;
    ASSERT_LE(end_of_last, layout.shard_elements);
    ASSERT_LE(piece.tensor_begin + piece.count, piece.tensor->num_elements);
    for (int64_t i = 0; i < piece.count; ++i) ++held[piece.tensor->name][piece.tensor_begin + i];
    // A piece lies where the unit's gathered buffer, cut into ranks, has it.
    for (const ParameterUnit* unit : layout.Units()) {
      if (piece.tensor < unit->tensors.data() ||
          piece.tensor >= unit->tensors.data() + unit->tensors.size())
        continue;
      ASSERT_EQ(rank * unit->shard_elements + piece.shard_begin - unit->shard_offset,
                piece.tensor->offset + piece.tensor_begin);
    }
  }
}

TEST(ParameterLayout, ShardsHoldEveryElementOnce) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t d : {1, 5, 7, 16}) {
      for (bool tied : {false, true}) {
        SCOPED_TRACE(absl::StrCat(ranks, " ranks, d ", d, tied ? ", tied" : ""));
        const ModelConfig config = Config(d, tied);
        const ParameterLayout layout = ParameterLayout::Make(config, ranks);
        std::map<std::string, std::vector<int>> held;
        for (const auto& [name, shape] : Checkpoint(config)) {
          held[name].resize(
              std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
        }
        for (int rank = 0; rank < ranks; ++rank) CountPieces(layout, rank, ranks, held);
        for (const auto& [name, times] : held) {
          for (size_t i = 0; i < times.size(); ++i)
            ASSERT_EQ(times[i], 1) << name << " element " << i;
        }
      }
    }
  }
}

TEST(ParameterLayout, UnitsLieOneAfterTheOther) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const ParameterLayout layout = ParameterLayout::Make(Config(7, false), ranks);
    int64_t shard_end = 0;
    for (const ParameterUnit* unit : layout.Units()) {
      EXPECT_EQ(unit->shard_offset, shard_end) << unit->name;
      EXPECT_EQ(unit->num_elements, unit->shard_elements * ranks) << unit->name;
      shard_end += unit->shard_elements;
      int64_t tensor_end = 0;
      for (const ParameterTensor& tensor : unit->tensors) {
        EXPECT_GE(tensor.offset, tensor_end) << tensor.name;
        EXPECT_EQ(tensor.offset % 16, 0) << tensor.name << " is not aligned";
        tensor_end = tensor.offset + tensor.num_elements;
      }
      EXPECT_LE(tensor_end, unit->num_elements) << unit->name;
    }
    EXPECT_EQ(layout.shard_elements, shard_end);
  }
}

}  // namespace
}  // namespace upipe::model
