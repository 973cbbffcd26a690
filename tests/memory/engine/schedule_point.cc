#include "tests/memory/engine/schedule_point.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::testing {

int64_t Point::padded_context() const {
  const int64_t multiple = std::lcm(ranks() * query_chunks, ring_ranks > 1 ? 2 * ring_ranks : 1);
  return (context + multiple - 1) / multiple * multiple;
}

int64_t Point::u() const {
  return method == v1::METHOD_UPIPE ? heads_per_stage
                                    : (num_heads + ulysses_ranks - 1) / ulysses_ranks;
}

int64_t Point::NumStages() const {
  const int64_t most = (num_heads + ulysses_ranks - 1) / ulysses_ranks;
  return (most + u() - 1) / u();
}

Point::Heads Point::A(int c) const {
  Heads heads;
  for (int64_t h = c * num_heads / ulysses_ranks; h < (c + 1) * num_heads / ulysses_ranks; ++h) {
    heads.insert(h);
  }
  return heads;
}

Point::Heads Point::Q(int64_t stage, int c) const {
  Heads heads;
  int64_t index = 0;
  for (int64_t h : A(c)) {
    if (index / u() == stage) heads.insert(h);
    ++index;
  }
  return heads;
}

Point::Heads Point::V(int64_t stage, int c) const {
  Heads heads;
  if (stage < 0 || stage >= NumStages()) return heads;
  for (int64_t h : Q(stage, c)) heads.insert(h / G());
  return heads;
}

Point::Heads Point::Release(int64_t stage, int c) const {
  const Heads now = V(stage, c), next = V(stage + 1, c);
  Heads heads;
  std::set_difference(now.begin(), now.end(), next.begin(), next.end(),
                      std::inserter(heads, heads.end()));
  return heads;
}

int64_t Point::QueryHeads(int c) const {
  int64_t most = 0;
  for (int64_t s = 0; s < NumStages(); ++s) {
    most = std::max(most, static_cast<int64_t>(Q(s, c).size()));
  }
  return most;
}

int64_t Point::StagedQueryHeads(int c) const {
  int64_t most = 0;
  for (int64_t s = 0; s < NumStages(); ++s) {
    int64_t heads = 0;
    for (int other = 0; other < ulysses_ranks; ++other) {
      if (other != c) heads += static_cast<int64_t>(Q(s, other).size());
    }
    most = std::max(most, heads);
  }
  return most;
}

int64_t Point::StageQueryHeads() const {
  int64_t most = 0;
  for (int64_t s = 0; s < NumStages(); ++s) {
    int64_t heads = 0;
    for (int c = 0; c < ulysses_ranks; ++c) heads += static_cast<int64_t>(Q(s, c).size());
    most = std::max(most, heads);
  }
  return most;
}

int64_t Point::KvSlots() const {
  size_t most = 0;
  for (int c = 0; c < ulysses_ranks; ++c) {
    for (int64_t s = 0; s < NumStages(); ++s) {
      Heads resident = V(s, c);
      if (policy.overlap) resident.merge(V(s + 1, c));
      most = std::max(most, resident.size());
    }
  }
  return static_cast<int64_t>(most);
}

int64_t Point::StageKvHeads() const {
  size_t most = 0;
  for (int c = 0; c < ulysses_ranks; ++c) {
    for (int64_t s = 0; s < NumStages(); ++s) most = std::max(most, V(s, c).size());
  }
  return static_cast<int64_t>(most);
}

bool Point::FetchesAfterTheFirst(int c) const {
  for (int64_t s = 1; s < NumStages(); ++s) {
    const Heads now = V(s, c), before = V(s - 1, c);
    if (!std::includes(before.begin(), before.end(), now.begin(), now.end())) return true;
  }
  return false;
}

int64_t Point::HeadsInParts() const {
  std::map<int64_t, std::pair<int64_t, int64_t>> span;  // of a head: its first and last part
  int64_t time = 0;
  for (int64_t s = 0; s < NumStages(); ++s) {
    for (int c = 0; c < ulysses_ranks; ++c) {
      for (int64_t head : Release(s, c)) {
        span.insert({head, {time, time}}).first->second.second = time;
        ++time;
      }
    }
  }
  int64_t most = 0;
  for (int64_t now = 0; now < time; ++now) {
    most = std::max<int64_t>(most, std::count_if(span.begin(), span.end(), [now](const auto& head) {
                               const auto [first, last] = head.second;
                               return first < last && first <= now && now <= last;
                             }));
  }
  return most;
}

namespace {

v1::Place PlaceOf(engine::Place place) {
  return place == engine::Place::kHost ? v1::PLACE_HOST : v1::PLACE_DEVICE;
}

v1::AttentionOutput OutputOf(engine::MemoryPolicy::AttentionOutput output) {
  using Output = engine::MemoryPolicy::AttentionOutput;
  if (output == Output::kDevice) return v1::ATTENTION_OUTPUT_DEVICE;
  return output == Output::kHost ? v1::ATTENTION_OUTPUT_HOST : v1::ATTENTION_OUTPUT_RECOMPUTE;
}

}  // namespace

v1::JobSpec Point::Spec() const {
  v1::JobSpec spec;
  spec.set_name("test");
  spec.mutable_data()->set_path("unused");
  auto& m = *spec.mutable_model();
  m.set_vocab_size(vocab_size);
  m.set_hidden_size(hidden_size);
  m.set_num_layers(num_layers);
  m.set_num_heads(num_heads);
  m.set_num_kv_heads(num_kv_heads);
  m.set_head_dim(head_dim);
  m.set_intermediate_size(intermediate_size);
  m.set_tie_embeddings(tied);
  auto& p = *spec.mutable_parallel();
  p.set_ranks(ranks());
  p.set_method(method);
  if (method == v1::METHOD_UPIPE) p.set_heads_per_stage(heads_per_stage * ulysses_ranks);
  if (method != v1::METHOD_RING && ring_ranks > 1) p.set_ring_ranks(ring_ranks);
  auto& memory = *spec.mutable_memory();
  memory.set_attention_output(OutputOf(policy.attention_output));
  memory.set_layer_inputs(PlaceOf(policy.layer_inputs));
  memory.set_checkpoint_stride(policy.checkpoint_stride);
  memory.set_hidden_stream(PlaceOf(policy.hidden_stream));
  memory.set_stage_kv(PlaceOf(policy.stage_kv));
  memory.set_query_chunks(query_chunks);
  memory.set_overlap(policy.overlap);
  memory.set_ring_kv(policy.ring_keeps_kv ? v1::RING_KV_KEEP : v1::RING_KV_PASS);
  memory.set_optimizer(PlaceOf(policy.optimizer));
  auto& train = *spec.mutable_train();
  train.set_context(context);
  train.set_steps(20);
  train.set_dtype(bf16 ? v1::DTYPE_BF16 : v1::DTYPE_FP32);
  return spec;
}

std::string Describe(const Point& point) {
  return absl::StrCat(v1::Method_Name(point.method), " C", point.ulysses_ranks, " R",
                      point.ring_ranks, " u", point.u(), " n", point.query_chunks, " ",
                      point.num_heads, "/", point.num_kv_heads, point.bf16 ? " bf16" : " fp32",
                      point.policy.overlap ? " overlap" : "");
}

}  // namespace upipe::testing
