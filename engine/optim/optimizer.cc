#include "engine/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::optim {

using engine::StageName;
using engine::Timed;

double LearningRate(const v1::OptimizerSpec& spec, int64_t step, int64_t total_steps) {
  const double peak = spec.learning_rate();
  const double warmup = static_cast<double>(spec.warmup_steps());
  const auto at = static_cast<double>(step);
  if (at <= warmup) return peak * at / warmup;
  const double span = std::max(1.0, static_cast<double>(total_steps) - warmup);
  const double progress = std::min(1.0, (at - warmup) / span);
  const double low = spec.min_learning_rate();
  return low + 0.5 * (peak - low) * (1 + std::cos(std::numbers::pi * progress));
}

StepScalars::LossAndCount TotalOf(const StepScalars::ByPosition& by_position) {
  StepScalars::LossAndCount total;
  for (const StepScalars::LossAndCount& range : by_position) {
    total.loss += range.loss;
    total.count += range.count;
  }
  return total;
}

namespace {

// Where the shard's ops find the scalars: in the device's block, or in a copy in host memory.
class ShardScalars {
 public:
  static absl::StatusOr<ShardScalars> Create(const engine::RankContext& context,
                                             const model::ShardedParameters& parameters,
                                             StepScalarsView device) {
    ShardScalars scalars(context, device);
    if (parameters.place() == engine::Place::kDevice) return scalars;
    UPIPE_ASSIGN_OR_RETURN(scalars.host_, context.device().host_allocator().Allocate(
                                              kernels::MemoryTag::kWorkspace, sizeof(StepScalars),
                                              *context.streams().host));
    return scalars;
  }

  StepScalarsView view() const { return host_ ? StepScalarsView(host_.data()) : device_; }

  // The host stream goes on where the compute stream is now, with the scalars as they are there.
  void ToShard() const {
    if (!host_) return;
    context_.device().CopyToHost(host_.data(), device_.data(), sizeof(StepScalars),
                                 context_.stream());
    context_.streams().host->Wait(context_.stream().Record());
  }
  // The compute stream goes on where the host stream is now.
  void Await() const {
    if (!host_) return;
    const engine::Waiting waiting(context_);
    context_.stream().Wait(context_.streams().host->Record());
  }
  // The same, with the scalars as they are there.
  void ToDevice() const {
    if (!host_) return;
    Await();
    context_.device().CopyFromHost(device_.data(), host_.data(), sizeof(StepScalars),
                                   context_.stream());
  }

 private:
  ShardScalars(const engine::RankContext& context, StepScalarsView device)
      : context_(context), device_(device) {}

  const engine::RankContext& context_;
  StepScalarsView device_;
  kernels::Buffer host_;
};

absl::Status UpdateShards(model::ShardedParameters& parameters, const v1::OptimizerSpec& spec,
                          double learning_rate, int64_t applied_step, StepScalarsView scalars) {
  for (const auto& piece : parameters.pieces()) {
    auto slice = [&](const kernels::TensorView& shard) {
      return shard.Rows(piece.shard_begin, piece.count);
    };
    UPIPE_RETURN_IF_ERROR(parameters.RunOnShards(kernels::AdamWParams{
        .param = slice(parameters.weights()),
        .grad = slice(parameters.gradients()),
        .m = slice(parameters.first_moments()),
        .v = slice(parameters.second_moments()),
        .scale = scalars.Scale(),
        .skip = scalars.Skip(),
        .lr = static_cast<float>(learning_rate),
        .beta1 = static_cast<float>(spec.beta1()),
        .beta2 = static_cast<float>(spec.beta2()),
        .eps = static_cast<float>(spec.eps()),
        .weight_decay = piece.tensor->decays() ? static_cast<float>(spec.weight_decay()) : 0.0f,
        .step = applied_step}));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status UpdateParameters(const engine::RankContext& context,
                              model::ShardedParameters& parameters, const v1::OptimizerSpec& spec,
                              double learning_rate, int64_t applied_step, StepScalarsView scalars) {
  UPIPE_ASSIGN_OR_RETURN(const ShardScalars at_shard,
                         ShardScalars::Create(context, parameters, scalars));
  const Timed timed(context, StageName::kOptimizer);
  const bool on_host = parameters.place() == engine::Place::kHost;
  const engine::RankContext at_shards = on_host ? context.On(*context.streams().host) : context;
  at_shard.ToShard();
  if (context.at().dp == 0) {
    const Timed summing(at_shards, StageName::kOptimizer);
    UPIPE_RETURN_IF_ERROR(parameters.RunOnShards(kernels::SumOfSquaresParams{
        .x = parameters.gradients(), .out = at_shard.view().SumOfSquares()}));
  }
  at_shard.ToDevice();
  UPIPE_ASSIGN_OR_RETURN(
      kernels::Buffer scratch,
      context.Allocate(kernels::MemoryTag::kComm,
                       context.comm().AllReduceScratchBytes(StepScalarsView::kNumReduced)));
  UPIPE_RETURN_IF_ERROR(context.comm().AllReduce(scalars.Reduced(), StepScalarsView::kNumReduced,
                                                 comm::ReduceOp::kSum, scratch.data(),
                                                 context.stream()));
  UPIPE_RETURN_IF_ERROR(
      context.Run(kernels::ClipScaleParams{.sum_of_squares = scalars.SumOfSquares(),
                                           .loss_and_count = scalars.LossAndCount(),
                                           .grad_norm = scalars.GradNorm(),
                                           .scale = scalars.Scale(),
                                           .skip = scalars.Skip(),
                                           .max_norm = static_cast<float>(spec.clip_norm())}));
  at_shard.ToShard();
  {
    const Timed updating(at_shards, StageName::kOptimizer);
    UPIPE_RETURN_IF_ERROR(
        UpdateShards(parameters, spec, learning_rate, applied_step, at_shard.view()));
  }
  at_shard.Await();
  return absl::OkStatus();
}

}  // namespace upipe::optim
