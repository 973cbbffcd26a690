// Which tensors a model has, how they are grouped into the units that are gathered and reduced
// together (embedding, each block, head), and where each lies in its unit. Names and shapes are
// those of Hugging Face checkpoints. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/model/model_config.h"

namespace upipe::model {

struct ParameterTensor {
  std::string name;            // e.g. "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [rows, cols] or [n]
  int64_t offset = 0;          // elements from the start of its unit
  int64_t num_elements = 0;
  double init_stddev = 0;  // normal(0, stddev), or, where it is 0, init_value
  double init_value = 1;   // norm weights one, biases zero
  bool decays() const { return shape.size() >= 2; }
};

// A unit is padded to a multiple of the ranks that share it, so every one of them holds
// shard_elements of it, starting at index * shard_elements of the unit and at shard_offset of the
// rank's shard of all units. A shard is a multiple of the replicas, each of which sums a part of
// it. Padding is zero.
struct ParameterUnit {
  std::string name;  // "embedding", "block.3", "head"
  std::vector<ParameterTensor> tensors;
  int64_t num_elements = 0;  // padded
  int64_t shard_elements = 0;
  int64_t shard_offset = 0;  // elements

  const ParameterTensor& Find(
      const std::string& suffix) const;  // by the end of the name; must exist
};

struct ParameterLayout {
  ParameterUnit embedding;  // embed_tokens, and the final norm when tied
  std::vector<ParameterUnit> blocks;
  ParameterUnit head;          // final norm and lm_head; empty when tied
  int64_t shard_elements = 0;  // of all units
  int64_t num_parameters = 0;  // without padding

  // `shard_ranks` share all parameters, and there are `dp_ranks` replicas of them.
  static ParameterLayout Make(const ModelConfig& config, int shard_ranks, int dp_ranks = 1);
  const ParameterUnit& HeadUnit() const { return head.tensors.empty() ? embedding : head; }
  std::vector<const ParameterUnit*> Units() const;  // in shard order
};

// Stable id of a tensor for the random generator: a hash of its name.
uint64_t TensorId(const std::string& name);

}  // namespace upipe::model
