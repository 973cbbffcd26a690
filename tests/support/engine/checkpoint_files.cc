#include "tests/support/engine/checkpoint_files.h"

#include <memory>
#include <random>

#include "common/check.h"
#include "engine/checkpoint/writer.h"

namespace upipe::testing {
namespace {

constexpr v1::ValueKind kKinds[] = {v1::VALUE_KIND_WEIGHT, v1::VALUE_KIND_FIRST_MOMENT,
                                    v1::VALUE_KIND_SECOND_MOMENT};

}  // namespace

v1::CheckpointManifest TestFacts() {
  v1::CheckpointManifest facts;
  const auto add = [&facts](const char* name, std::vector<int64_t> shape) {
    v1::TensorExtent& tensor = *facts.add_tensors();
    tensor.set_name(name);
    for (const int64_t dim : shape) tensor.add_shape(dim);
  };
  add("b", {40000});
  add("a", {3, 5});
  add("c", {checkpoint::kBlockElements});
  *facts.mutable_state() = TestState(0);
  return facts;
}

v1::TrainingState TestState(int64_t step) {
  v1::TrainingState state;
  state.set_step(step);
  state.set_applied_steps(step);
  state.set_seed(7);
  state.set_context(64);
  state.set_sequences_per_step(2);
  return state;
}

v1::CheckpointOwner TestOwner(int64_t generation) {
  v1::CheckpointOwner owner;
  owner.set_job_id("job");
  owner.set_generation(generation);
  owner.set_nonce("nonce" + std::to_string(generation));
  return owner;
}

TestTensors::TestTensors(uint64_t seed) {
  std::mt19937_64 random(seed);
  const v1::CheckpointManifest facts = TestFacts();
  for (const v1::TensorExtent& tensor : facts.tensors()) {
    for (const v1::ValueKind kind : kKinds) {
      std::vector<float>& values = values_[{tensor.name(), kind}];
      values.resize(checkpoint::NumElements(tensor));
      for (float& value : values) value = static_cast<float>(random() % 1000003);
    }
  }
}

const std::vector<float>& TestTensors::values(const std::string& tensor, v1::ValueKind kind) const {
  return values_.at({tensor, kind});
}

std::vector<checkpoint::MemoryPiece> TestTensors::Pieces(int rank, int ranks) const {
  std::vector<checkpoint::MemoryPiece> pieces;
  for (const auto& [key, values] : values_) {
    const auto size = static_cast<int64_t>(values.size());
    const int64_t begin = size * rank / ranks;
    const int64_t end = size * (rank + 1) / ranks;
    if (begin == end) continue;
    pieces.push_back({.tensor = key.first,
                      .kind = key.second,
                      .offset = begin,
                      .count = end - begin,
                      .data = values.data() + begin});
  }
  return pieces;
}

v1::CheckpointRef WriteTestCheckpoint(const checkpoint::JobFolder& folder, int64_t generation,
                                      int64_t step, int ranks, uint64_t seed) {
  const TestTensors tensors(seed);
  v1::CheckpointRef committed;
  UPIPE_CHECK_OK(folder.Claim(TestOwner(generation)));
  std::vector<std::unique_ptr<checkpoint::Writer>> writers;
  for (int rank = 0; rank < ranks; ++rank) {
    writers.push_back(std::make_unique<checkpoint::Writer>(checkpoint::WriterOptions{
        .folder = folder,
        .owner = TestOwner(generation),
        .rank = rank,
        .num_ranks = ranks,
        .facts = TestFacts(),
        .arithmetic = "test",
        .patience = absl::Minutes(1),
        .on_committed = [&committed](const v1::CheckpointRef& ref) { committed = ref; }}));
    writers.back()->Start(TestState(step), tensors.Pieces(rank, ranks));
  }
  for (auto& writer : writers) writer->AwaitIdle();
  for (auto& writer : writers) UPIPE_CHECK_OK(writer->last_error());
  writers.clear();
  return committed;
}

}  // namespace upipe::testing
