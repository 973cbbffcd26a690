// One rank's training step, and everything that lives from step to step. Read this first: life of a
// step is
//   vote at the boundary -> for each micro-step: tokens to the device -> forward, loss, backward
//   (model/llama.h; attention/) -> gradients summed over ranks as each unit is done -> once:
//   gradients over replicas -> loss, count and norm over everyone -> clip -> AdamW (optim/).
// The planner runs this very class on the dry device, so its bytes cannot drift from a real run's.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/model/llama.h"
#include "engine/optim/optimizer.h"
#include "engine/train/snapshot.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// Where the host reads this rank's part of a sequence, in the order the rank holds it
// (TokenMap::RunsOf).
struct HostTokens {
  const int32_t* tokens = nullptr;     // [N]
  const int32_t* labels = nullptr;     // [N] next tokens; negative = no label
  const int64_t* positions = nullptr;  // [N] rotary
  // Of the whole sequence: global positions where its documents begin, ascending from 0.
  std::vector<int64_t> document_starts = {0};
};

// Which rank of a sequence's context ranks holds which of its tokens.
parallel::TokenMap TokensOf(const v1::JobSpec& spec);

// The sequence that `group` (Mesh::SequenceGroup) trains on in micro-step `micro` (0-based) of
// `step` (1-based). dp, fsdp and accumulation share the sequences of a step out in different ways;
// which ones they are depends on dp * fsdp * accumulation alone.
int64_t SequenceOf(const v1::JobSpec& spec, int64_t step, int64_t micro, int64_t group);
// dp * fsdp * accumulation.
int64_t SequencesPerStep(const v1::JobSpec& spec);

struct StepResult {
  double loss = 0;  // mean over the valid tokens of all ranks, nats; NaN without any
  double valid_tokens = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  bool skipped = false;                        // nothing was updated
  optim::StepScalars::ByPosition by_position;  // of all ranks
};

// What ranks tell each other at a step boundary; all go by the largest of each.
struct BoundaryVote {
  bool stop = false;        // asked to leave
  bool writing = false;     // the last checkpoint is still being written
  int64_t failed_step = 0;  // of a checkpoint that could not be written; 0 = none
  int64_t sealed_step = 0;  // of one that will not be given up any more
};

class TrainStep {
 public:
  // Allocates weights, gradients, moments and step buffers, initialises them and compares the
  // schedule's hash over all ranks (blocking). `plan` is borrowed and needs spec (with defaults),
  // schedule and schedule_hash.
  static absl::StatusOr<std::unique_ptr<TrainStep>> Create(const engine::RankContext& context,
                                                           const v1::RunPlan& plan);

  // After an error a TrainStep is good for destruction only.

  // One optimizer step (1-based) over the sequences of this rank's group, one per micro-step, as
  // many as the spec's gradient_accumulation. Blocks until the device has finished it. Collective.
  absl::StatusOr<StepResult> Run(int64_t step, absl::Span<const HostTokens> micro_steps);

  // Summed loss and token count of held-out sequences, one per group, over all ranks, by range of
  // positions. Blocking, collective.
  absl::StatusOr<optim::StepScalars::ByPosition> Evaluate(int64_t step, const HostTokens& host);

  // The same answer on every rank: they leave, and checkpoint, at the same step. Blocking,
  // collective.
  absl::StatusOr<BoundaryVote> Vote(const BoundaryVote& mine);

  // Copies this rank's part of a checkpoint; only where the spec has a checkpoint path, and while
  // nobody reads the copy. Blocking. The pieces live as long as the step.
  absl::StatusOr<std::vector<checkpoint::MemoryPiece>> TakeSnapshot();
  // Goes on from there: weights, moments and the count of applied updates. Blocking. Cancelled when
  // `stop` (may be null) becomes true.
  absl::Status Restore(const checkpoint::Checkpoint& from, const std::atomic<bool>* stop);
  int64_t applied_steps() const { return applied_steps_; }

  const parallel::TokenMap& tokens() const { return tokens_; }
  model::ShardedParameters& parameters() { return *parameters_; }
  model::LlamaModel& model() { return *model_; }
  // Puts a sequence's tokens on the device and returns the batch, whose loss is added to.
  model::Batch Upload(const HostTokens& host);

 private:
  TrainStep(const engine::RankContext& context, const v1::RunPlan& plan);
  absl::Status Allocate();
  absl::Status ClearScalars();
  absl::Status Reduce(int64_t count, comm::ReduceOp op);
  absl::StatusOr<optim::StepScalars> ReadScalars();

  const engine::RankContext& context_;
  const v1::RunPlan& plan_;
  model::ModelConfig config_;
  parallel::TokenMap tokens_;
  model::ParameterLayout layout_;
  int64_t applied_steps_ = 0;        // updates not skipped: the bias correction's clock
  std::array<double, 4> vote_ = {};  // while it travels
  kernels::Buffer positions_, token_ids_, labels_, scalars_;
  std::unique_ptr<model::ShardedParameters> parameters_;
  std::optional<Snapshot> snapshot_;  // where the spec has a checkpoint path
  std::unique_ptr<model::LlamaModel> model_;
};

}  // namespace upipe::train
