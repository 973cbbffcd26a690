// The methods that are compared, as job files say them: points of one schedule space and one memory
// policy each (docs/architecture.md, "The head-chunk schedule"), the same model, tokens and
// initial weights for all.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "upipe/v1/job.pb.h"

namespace upipe::bench {

// Model and step of all methods. 16 heads over 8 K/V heads: on 4 and on 8 ranks every head has a
// rank and UPipe has several stages.
struct MethodJob {
  int ranks = 4;
  int64_t context = 8192;
  bool bf16 = true;
  int64_t hidden_size = 512, intermediate_size = 1024, vocab_size = 512, num_layers = 1;
  int64_t num_heads = 16, num_kv_heads = 8, head_dim = 64;
};

struct MethodCase {
  std::string name;  // "upipe R=2"
  v1::Method method = v1::METHOD_UPIPE;
  int ring_ranks = 1;           // R of upipe and usp; ring takes all ranks
  int64_t query_chunks = 1;     // n
  bool hidden_on_host = false;  // with the layer inputs
  // UPipe runs at its default, one query head per rank and stage.
  v1::JobSpec Spec(const MethodJob& job) const;
};

// In the order of the tables.
const std::vector<MethodCase>& AllMethods();
// One of AllMethods(), by name.
const MethodCase& MethodNamed(const std::string& name);

}  // namespace upipe::bench
