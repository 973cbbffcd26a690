// The shape of a model of the Llama family as the engine uses it: a ModelSpec with every default
// filled in, in plain numbers.
#pragma once

#include <cstdint>
#include <optional>

#include "kernels/api/op_params.h"
#include "upipe/v1/job.pb.h"

namespace upipe::model {

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;  // d
  int64_t num_layers = 0;
  int64_t num_heads = 0;          // H
  int64_t num_kv_heads = 0;       // K
  int64_t head_dim = 0;           // D
  int64_t intermediate_size = 0;  // F
  float rms_norm_eps = 1e-5f;
  bool tie_embeddings = false;
  bool qk_norm = false;   // RMSNorm over head_dim of every query and key head before RoPE (Qwen3)
  bool qkv_bias = false;  // (Qwen2.5)
  kernels::RopeConfig rope;
  bool causal = true;
  std::optional<int64_t> window;  // positions a query sees, itself included
  double init_stddev = 0.02;

  // The spec must have passed ValidateJobSpec and WithDefaults. `context`, tokens of a sequence, is
  // what dynamic RoPE scaling stretches for.
  static ModelConfig From(const v1::ModelSpec& spec, int64_t context);
};

// What a job stores its tensors in.
kernels::DType StorageTypeOf(const v1::TrainSpec& spec);

}  // namespace upipe::model
