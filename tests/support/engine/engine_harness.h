// Runs a training step's ranks as threads in a test: real devices, the inproc communicator (or
// others the caller brings), sequences cut as the token map says, and a way to set weights and
// collect gradients by Hugging Face name, whatever the axes and wherever shards live.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/comm/communicator.h"
#include "engine/train/step.h"
#include "kernels/device_factory.h"

namespace upipe::testing {

// Full tensors by name.
using Tensors = std::map<std::string, std::vector<float>>;

// The backend of jobs for which a test names none: "cpu", unless the program that runs the tests
// sets another before the first.
std::string& TestedBackend();

// Plays a backend that this build may lack, from here on: its devices come of `make`, have host
// memory and run our own attention; plans for it count that.
using DeviceMaker =
    std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(const kernels::DeviceOptions&)>;
void PlayBackend(const std::string& backend, DeviceMaker make);

// A small, valid job without data file.
struct SmallJob {
  int ranks = 1;               // of all axes together
  int64_t heads_per_rank = 1;  // u, of upipe
  int64_t num_heads = 4, num_kv_heads = 2, head_dim = 8;
  int64_t hidden_size = 24, intermediate_size = 40, vocab_size = 37, num_layers = 2, context = 24;
  bool tie_embeddings = false;
  v1::Method method = v1::METHOD_UPIPE;
  bool qk_norm = false;
  bool qkv_bias = false;
  bool bf16 = false;
  std::string backend = TestedBackend();
  // Axes; the rest of the ranks are Ulysses ranks (of `ring`: ring ranks).
  int ring_ranks = 1, fsdp_ranks = 1, dp_ranks = 1;
  int64_t accumulation = 1;
  // The mask.
  bool causal = true;
  std::optional<int64_t> window = {};
  v1::Documents documents = v1::DOCUMENTS_JOIN;
  // The memory policy; unset: the method's default.
  std::optional<v1::AttentionOutput> attention_output = {};
  std::optional<v1::Place> layer_inputs = {}, hidden_stream = {}, stage_kv = {}, optimizer = {};
  std::optional<int64_t> query_chunks = {};
  int stride = 1;
  bool overlap = false;
  bool ring_keep = false;
};
v1::JobSpec MakeSpec(const SmallJob& job);
// The plan of a spec without data.
absl::StatusOr<v1::RunPlan> MakePlan(const v1::JobSpec& spec);

// A rank's part of a sequence, in the order the rank holds it.
struct RankTokens {
  std::vector<int32_t> tokens, labels;   // [N]
  std::vector<int64_t> positions;        // [N] rotary
  std::vector<int64_t> document_starts;  // of the whole sequence
  train::HostTokens host() const;        // borrows
};

// A whole sequence, without padding.
struct Sequence {
  std::vector<int32_t> tokens, labels;         // [context]; -1 = no label
  std::vector<int64_t> document_starts = {0};  // ascending from 0
  bool positions_restart = false;              // in every document
  RankTokens Slice(const parallel::TokenMap& map, int context_rank) const;
};
// Reproducible tokens and next-token labels of a job's context. `document_starts` as the spec's
// data.documents reads them: with join there may be only {0}; no label crosses their bounds.
Sequence MakeSequence(const v1::JobSpec& spec, uint64_t seed,
                      std::vector<int64_t> document_starts = {0});

struct Rank {
  int rank;
  const engine::RankContext& context;
  train::TrainStep& step;
};

// One step (1-based) over all sequences of the step, in the order of train::SequenceOf: this rank
// takes those of its group.
absl::StatusOr<train::StepResult> RunStep(Rank rank, int64_t step,
                                          absl::Span<const Sequence> sequences);
absl::StatusOr<train::StepResult> RunStep(Rank rank, int64_t step, const Sequence& sequence);
// Of one sequence per group, in the order of groups.
absl::StatusOr<optim::StepScalars::ByPosition> Evaluate(Rank rank, int64_t step,
                                                        absl::Span<const Sequence> sequences);

struct RankThreads {
  const v1::RunPlan& plan;
  // Device options beyond what the plan says (test delays, poison, a larger arena).
  std::function<void(int rank, kernels::DeviceOptions&)> adjust = {};
  bool timed = false;  // everything in `body` is one step of a clock that keeps slices
};

// Creates one TrainStep per rank on its own thread and calls body on each; the first failing rank's
// status.
absl::Status RunRanks(const RankThreads& threads, const std::function<absl::Status(Rank)>& body);
// The context a plan's rank runs in, for tests that bring their own communicator or device.
engine::RankContext MakeContext(const v1::RunPlan& plan, kernels::Device& device,
                                const engine::RankStreams& streams, comm::Communicator& comm,
                                engine::StepClock* clock = nullptr);

// Overwrites this rank's shard with slices of full tensors (every tensor must be there), or
// collects from it.
absl::Status SetWeights(Rank rank, const Tensors& weights);
// This rank's shard (weights(), gradients(), ..), wherever it lives.
absl::StatusOr<std::vector<float>> ReadShard(Rank rank, const kernels::TensorView& shard);
// Reproducible weights of a plan's model in which every parameter matters: norm weights around one,
// biases around zero, matrices at the plan's init_stddev.
Tensors RandomWeights(const v1::RunPlan& plan, uint64_t seed);
class Collector {
 public:
  // Adds this rank's pieces of a shard (weights(), gradients(), ..), each element times `scale`; of
  // replicas those of dp rank 0. Thread-safe.
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
