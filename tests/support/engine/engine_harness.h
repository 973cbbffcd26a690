// Runs a training step's ranks as threads in a test: real devices, the inproc communicator (or
// others the caller brings), and a way to set weights and collect gradients by Hugging Face name,
// whatever the sharding.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/comm/communicator.h"
#include "engine/train/step.h"
#include "kernels/device_factory.h"

namespace upipe::testing {

// Full tensors by name.
using Tensors = std::map<std::string, std::vector<float>>;

// A small, valid job: `ranks` ranks, upipe with u heads per rank and stage, no data file.
struct SmallJob {
  int ranks = 1;
  int64_t heads_per_rank = 1;
  int64_t num_heads = 4, num_kv_heads = 2, head_dim = 8;
  int64_t hidden_size = 24, intermediate_size = 40, vocab_size = 37, num_layers = 2, context = 24;
  bool tie_embeddings = false;
  bool ulysses = false;
  bool qk_norm = false;
  bool qkv_bias = false;
  bool bf16 = false;
  std::string backend = "cpu";
};
v1::JobSpec MakeSpec(const SmallJob& job);
// The plan of a spec without data.
absl::StatusOr<v1::RunPlan> MakePlan(const v1::JobSpec& spec);

// Reproducible tokens and next-token labels of a whole padded sequence; labels past the context are
// -1.
struct Sequence {
  std::vector<int32_t> tokens, labels;
  train::HostTokens Slice(const parallel::TokenMap& map, int rank) const;
};
Sequence MakeSequence(int64_t context, int64_t padded_context, int64_t vocab_size, uint64_t seed);

struct Rank {
  int rank;
  const engine::RankContext& context;
  train::TrainStep& step;
};

struct RankThreads {
  const v1::RunPlan& plan;
  // Device options beyond what the plan says (test delays, poison, a larger arena).
  std::function<void(int rank, kernels::DeviceOptions&)> adjust = {};
};

// Creates one TrainStep per rank on its own thread and calls body on each; the first failing rank's
// status.
absl::Status RunRanks(const RankThreads& threads, const std::function<absl::Status(Rank)>& body);

// Overwrites this rank's shard with slices of full tensors (every tensor must be there), or
// collects from it.
absl::Status SetWeights(Rank rank, const Tensors& weights);
// Reproducible weights of a plan's model in which every parameter matters: norm weights around one,
// biases around zero, matrices at the plan's init_stddev.
Tensors RandomWeights(const v1::RunPlan& plan, uint64_t seed);
class Collector {
 public:
  // Adds this rank's pieces of a shard (weights(), gradients(), ..), each element times `scale`.
  // Thread-safe.
  absl::Status Add(Rank rank, const kernels::TensorView& shard, double scale = 1);
  const Tensors& tensors() const { return tensors_; }

 private:
  std::mutex mutex_;
  Tensors tensors_;
};

inline constexpr double kHalfEpsilonOfBf16 = 1.0 / 256;

// ||a - b|| / ||b|| in double; infinity when sizes differ.
double RelativeError(absl::Span<const float> a, absl::Span<const float> b);

}  // namespace upipe::testing
