#include "engine/train/step.h"

#include <numeric>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/status.h"

namespace upipe::train {

using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;
using optim::StepScalars;
using optim::StepScalarsView;

TrainStep::TrainStep(const engine::RankContext& context, const v1::RunPlan& plan)
    : context_(context),
      plan_(plan),
      config_(model::ModelConfig::From(plan.spec().model(), plan.spec().train().context())),
      tokens_(parallel::TokenMap::Make(plan.spec().train().context(), context.num_ranks())),
      layout_(model::ParameterLayout::Make(config_, context.num_ranks())) {}

absl::StatusOr<std::unique_ptr<TrainStep>> TrainStep::Create(const engine::RankContext& context,
                                                             const v1::RunPlan& plan) {
  UPIPE_CHECK(context.storage() == model::StorageTypeOf(plan.spec().train()))
      << "the rank stores " << NameOf(context.storage()) << ", the plan says otherwise";
  auto step = std::unique_ptr<TrainStep>(new TrainStep(context, plan));
  context.Mark(0, StepPass::kStarting, -1, -1);
  UPIPE_RETURN_IF_ERROR(step->Allocate());
  UPIPE_ASSIGN_OR_RETURN(
      kernels::Buffer scratch,
      context.Allocate(MemoryTag::kComm, context.num_ranks() * sizeof(uint64_t)));
  UPIPE_RETURN_IF_ERROR(
      comm::VerifySameOnAllRanks(context.comm(), parallel::HashOf(plan.schedule()),
                                 "head-chunk schedule", scratch.data(), context.stream()));
  return step;
}

absl::Status TrainStep::Allocate() {
  const int64_t n = tokens_.tokens_per_rank;
  UPIPE_ASSIGN_OR_RETURN(positions_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt64)));
  UPIPE_ASSIGN_OR_RETURN(token_buffer_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt32)));
  UPIPE_ASSIGN_OR_RETURN(label_buffer_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt32)));
  UPIPE_ASSIGN_OR_RETURN(scalars_, context_.Allocate(MemoryTag::kWorkspace, sizeof(StepScalars)));
  UPIPE_ASSIGN_OR_RETURN(auto parameters, model::ShardedParameters::Create(
                                              context_, layout_, plan_.spec().train().seed()));
  parameters_ = std::make_unique<model::ShardedParameters>(std::move(parameters));
  model_ = std::make_unique<model::LlamaModel>(
      context_,
      model::LlamaParams{.config = config_,
                         .schedule = &plan_.schedule(),
                         .tokens = tokens_,
                         .positions = TensorView::Vector(positions_.data(), DType::kInt64, n),
                         .keep_attention_output = plan_.spec().memory().attention_output() ==
                                                  v1::ATTENTION_OUTPUT_DEVICE},
      *parameters_);
  std::vector<int64_t> positions(n);
  std::iota(positions.begin(), positions.end(), tokens_.RunOf(context_.rank()).begin);
  context_.device().CopyFromHost(positions_.data(), positions.data(), n * SizeOf(DType::kInt64),
                                 context_.stream());
  return context_.stream().Synchronize();  // `positions` must outlive its copy
}

absl::StatusOr<model::Batch> TrainStep::Upload(const HostTokens& host) {
  const int64_t n = tokens_.tokens_per_rank;
  const int64_t bytes = n * SizeOf(DType::kInt32);
  context_.device().CopyFromHost(token_buffer_.data(), host.tokens, bytes, context_.stream());
  context_.device().CopyFromHost(label_buffer_.data(), host.labels, bytes, context_.stream());
  UPIPE_RETURN_IF_ERROR(context_.Fill(
      TensorView::Vector(scalars_.data(), DType::kFloat64, StepScalarsView::kNumReduced), 0));
  return model::Batch{.tokens = TensorView::Vector(token_buffer_.data(), DType::kInt32, n),
                      .labels = TensorView::Vector(label_buffer_.data(), DType::kInt32, n),
                      .loss_and_count = StepScalarsView(scalars_.data()).LossAndCount()};
}

absl::StatusOr<StepResult> TrainStep::Run(int64_t step, const HostTokens& host) {
  const v1::OptimizerSpec& spec = plan_.spec().optimizer();
  context_.Mark(step, StepPass::kEmbed, -1, -1);
  UPIPE_ASSIGN_OR_RETURN(const model::Batch batch, Upload(host));
  UPIPE_RETURN_IF_ERROR(model_->ForwardBackward(batch, step));
  context_.Mark(step, StepPass::kOptimizer, -1, -1);
  StepResult result;
  result.learning_rate = optim::LearningRate(spec, step, plan_.spec().train().steps());
  UPIPE_RETURN_IF_ERROR(optim::UpdateParameters(context_, *parameters_, spec, result.learning_rate,
                                                applied_steps_ + 1,
                                                StepScalarsView(scalars_.data())));
  UPIPE_ASSIGN_OR_RETURN(const StepScalars scalars, ReadScalars());
  const StepScalars::LossAndCount total = optim::TotalOf(scalars.by_position);
  result.loss = total.loss / total.count;
  result.valid_tokens = total.count;
  result.by_position = scalars.by_position;
  result.grad_norm = scalars.grad_norm;
  result.skipped = scalars.skip != 0;
  if (!result.skipped) ++applied_steps_;
  return result;
}

absl::StatusOr<StepScalars::ByPosition> TrainStep::Evaluate(int64_t step, const HostTokens& host) {
  UPIPE_ASSIGN_OR_RETURN(const model::Batch batch, Upload(host));
  UPIPE_RETURN_IF_ERROR(model_->Evaluate(batch, step));
  UPIPE_RETURN_IF_ERROR(Reduce(StepScalarsView::kNumReduced, comm::ReduceOp::kSum));
  UPIPE_ASSIGN_OR_RETURN(const StepScalars scalars, ReadScalars());
  return scalars.by_position;
}

absl::StatusOr<bool> TrainStep::AnyRank(bool flag) {
  UPIPE_RETURN_IF_ERROR(
      context_.Fill(TensorView::Vector(scalars_.data(), DType::kFloat64, 1), flag ? 1 : 0));
  UPIPE_RETURN_IF_ERROR(Reduce(1, comm::ReduceOp::kMax));
  UPIPE_ASSIGN_OR_RETURN(const StepScalars scalars, ReadScalars());
  return scalars.by_position[0].loss != 0;
}

absl::Status TrainStep::Reduce(int64_t count, comm::ReduceOp op) {
  UPIPE_ASSIGN_OR_RETURN(
      kernels::Buffer scratch,
      context_.Allocate(MemoryTag::kComm, context_.comm().AllReduceScratchBytes(count)));
  return context_.comm().AllReduce(static_cast<double*>(scalars_.data()), count, op, scratch.data(),
                                   context_.stream());
}

absl::StatusOr<StepScalars> TrainStep::ReadScalars() {
  StepScalars scalars;
  context_.device().CopyToHost(&scalars, scalars_.data(), sizeof(scalars), context_.stream());
  UPIPE_RETURN_IF_ERROR(context_.stream().Synchronize());
  return scalars;
}

}  // namespace upipe::train
