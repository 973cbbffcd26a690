// One rank's training step, and everything that lives from step to step. Read this first: life of a
// step is
//   vote to go on -> tokens to the device -> forward, loss, backward (model/llama.h; attention/) ->
//   gradients summed over ranks as each unit is done -> loss, count and norm reduced once -> clip
//   -> AdamW (optim/).
// The planner runs this very class on the dry device, so its bytes cannot drift from a real run's.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "engine/model/llama.h"
#include "engine/optim/optimizer.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// Where the host reads this rank's part of a sequence: [N] tokens and next-token labels (negative =
// no label).
struct HostTokens {
  const int32_t* tokens = nullptr;
  const int32_t* labels = nullptr;
};

struct StepResult {
  double loss = 0;  // mean over the valid tokens of all ranks, nats; NaN without any
  double valid_tokens = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  bool skipped = false;                        // nothing was updated
  optim::StepScalars::ByPosition by_position;  // of all ranks
};

class TrainStep {
 public:
  // Allocates weights, gradients, moments and step buffers, initialises them and compares the
  // schedule's hash over all ranks (blocking). `plan` is borrowed and needs spec (with defaults),
  // schedule and schedule_hash.
  static absl::StatusOr<std::unique_ptr<TrainStep>> Create(const engine::RankContext& context,
                                                           const v1::RunPlan& plan);

  // After an error a TrainStep is good for destruction only.

  // One optimizer step (1-based). Blocks until the device has finished it. Collective.
  absl::StatusOr<StepResult> Run(int64_t step, const HostTokens& host);

  // Summed loss and token count of one held-out sequence over all ranks, by range of positions.
  // Blocking, collective.
  absl::StatusOr<optim::StepScalars::ByPosition> Evaluate(int64_t step, const HostTokens& host);

  // True on every rank when any rank asks: the ranks leave at the same step. Blocking, collective.
  absl::StatusOr<bool> AnyRank(bool flag);

  const parallel::TokenMap& tokens() const { return tokens_; }
  model::ShardedParameters& parameters() { return *parameters_; }
  model::LlamaModel& model() { return *model_; }
  // Puts a sequence's tokens on the device and returns the batch, with the step's loss cleared.
  absl::StatusOr<model::Batch> Upload(const HostTokens& host);

 private:
  TrainStep(const engine::RankContext& context, const v1::RunPlan& plan);
  absl::Status Allocate();
  absl::Status Reduce(int64_t count, comm::ReduceOp op);
  absl::StatusOr<optim::StepScalars> ReadScalars();

  const engine::RankContext& context_;
  const v1::RunPlan& plan_;
  model::ModelConfig config_;
  parallel::TokenMap tokens_;
  model::ParameterLayout layout_;
  int64_t applied_steps_ = 0;  // updates not skipped: the bias correction's clock
  kernels::Buffer positions_, token_buffer_, label_buffer_, scalars_;
  std::unique_ptr<model::ShardedParameters> parameters_;
  std::unique_ptr<model::LlamaModel> model_;
};

}  // namespace upipe::train
