#include "benchmarks/methods/method_case.h"

#include <algorithm>

#include "common/check.h"

namespace upipe::bench {

v1::JobSpec MethodCase::Spec(const MethodJob& job) const {
  v1::JobSpec spec;
  spec.set_name("bench-methods");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(job.vocab_size);
  model.set_hidden_size(job.hidden_size);
  model.set_num_layers(job.num_layers);
  model.set_num_heads(job.num_heads);
  model.set_num_kv_heads(job.num_kv_heads);
  model.set_head_dim(job.head_dim);
  model.set_intermediate_size(job.intermediate_size);
  spec.mutable_data()->set_path("unused");
  v1::ParallelSpec& parallel = *spec.mutable_parallel();
  parallel.set_ranks(job.ranks);
  parallel.set_method(method);
  if (ring_ranks > 1) parallel.set_ring_ranks(ring_ranks);
  if (method == v1::METHOD_UPIPE) parallel.set_heads_per_stage(job.ranks / ring_ranks);
  v1::MemorySpec& memory = *spec.mutable_memory();
  if (query_chunks > 1) memory.set_query_chunks(query_chunks);
  if (hidden_on_host) {
    memory.set_layer_inputs(v1::PLACE_HOST);
    memory.set_hidden_stream(v1::PLACE_HOST);
  }
  v1::TrainSpec& train = *spec.mutable_train();
  train.set_context(job.context);
  train.set_steps(1000);
  train.set_eval_sequences(0);
  train.set_dtype(job.bf16 ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  return spec;
}

const std::vector<MethodCase>& AllMethods() {
  static const auto& methods = *new std::vector<MethodCase>{
      {.name = "upipe", .method = v1::METHOD_UPIPE},
      {.name = "ulysses", .method = v1::METHOD_ULYSSES},
      {.name = "ring", .method = v1::METHOD_RING},
      {.name = "usp R=2", .method = v1::METHOD_USP, .ring_ranks = 2},
      {.name = "upipe R=2", .method = v1::METHOD_UPIPE, .ring_ranks = 2},
      {.name = "fpdt n=4", .method = v1::METHOD_FPDT, .query_chunks = 4},
      {.name = "upipe n=4", .method = v1::METHOD_UPIPE, .query_chunks = 4},
      {.name = "upipe n=4 host",
       .method = v1::METHOD_UPIPE,
       .query_chunks = 4,
       .hidden_on_host = true},
  };
  return methods;
}

const MethodCase& MethodNamed(const std::string& name) {
  const auto& all = AllMethods();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const MethodCase& method) { return method.name == name; });
  UPIPE_CHECK(found != all.end()) << "no method " << name;
  return *found;
}

}  // namespace upipe::bench
