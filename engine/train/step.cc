#include "engine/train/step.h"

#include <utility>

#include "common/check.h"
#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::train {

using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;
using optim::StepScalars;
using optim::StepScalarsView;

parallel::TokenMap TokensOf(const v1::JobSpec& spec) {
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  return parallel::TokenMap::Make({.context = spec.train().context(),
                                   .ulysses_ranks = mesh.ulysses_ranks,
                                   .ring_ranks = mesh.ring_ranks,
                                   .query_chunks = spec.memory().query_chunks()});
}

int64_t SequencesPerStep(const v1::JobSpec& spec) {
  return parallel::Mesh::From(spec.parallel()).sequence_groups() *
         spec.train().gradient_accumulation();
}

int64_t SequenceOf(const v1::JobSpec& spec, int64_t step, int64_t micro, int64_t group) {
  const int64_t groups = parallel::Mesh::From(spec.parallel()).sequence_groups();
  return (step - 1) * SequencesPerStep(spec) + micro * groups + group;
}

TrainStep::TrainStep(const engine::RankContext& context, const v1::RunPlan& plan)
    : context_(context),
      plan_(plan),
      config_(model::ModelConfig::From(plan.spec().model(), plan.spec().train().context())),
      tokens_(TokensOf(plan.spec())),
      layout_(model::ParameterLayout::Make(config_, context.mesh().shard_ranks(),
                                           context.mesh().dp_ranks)) {}

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
  UPIPE_RETURN_IF_ERROR(comm::VerifySameOnAllRanks(
      context.comm(), parallel::HashOf(plan.schedule()), "head-chunk schedule", scratch.data(),
      context.device(), context.stream()));
  return step;
}

absl::Status TrainStep::Allocate() {
  const int64_t n = tokens_.tokens_per_rank;
  const auto policy = engine::MemoryPolicy::From(plan_.spec().memory());
  UPIPE_ASSIGN_OR_RETURN(positions_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt64)));
  UPIPE_ASSIGN_OR_RETURN(token_ids_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt32)));
  UPIPE_ASSIGN_OR_RETURN(labels_,
                         context_.Allocate(MemoryTag::kWorkspace, n * SizeOf(DType::kInt32)));
  UPIPE_ASSIGN_OR_RETURN(scalars_, context_.Allocate(MemoryTag::kWorkspace, sizeof(StepScalars)));
  UPIPE_ASSIGN_OR_RETURN(
      parameters_, model::ShardedParameters::Create(context_, layout_, plan_.spec().train().seed(),
                                                    policy.optimizer));
  if (!plan_.spec().checkpoint().path().empty()) {
    UPIPE_ASSIGN_OR_RETURN(snapshot_, Snapshot::Create(context_, *parameters_));
  }
  model_ = std::make_unique<model::LlamaModel>(
      context_,
      model::LlamaParams{
          .config = config_, .schedule = &plan_.schedule(), .tokens = tokens_, .policy = policy},
      *parameters_);
  return absl::OkStatus();
}

model::Batch TrainStep::Upload(const HostTokens& host) {
  const engine::Timed timed(context_, engine::StageName::kEmbedding);
  const int64_t n = tokens_.tokens_per_rank;
  const auto upload = [&](const kernels::Buffer& to, const void* from, DType dtype) {
    context_.device().CopyFromHost(to.data(), from, n * SizeOf(dtype), context_.stream());
    return TensorView::Vector(to.data(), dtype, n);
  };
  model::Batch batch;
  batch.tokens = upload(token_ids_, host.tokens, DType::kInt32);
  batch.labels = upload(labels_, host.labels, DType::kInt32);
  batch.sequence.positions = upload(positions_, host.positions, DType::kInt64);
  kernels::AttentionMask& mask = batch.sequence.mask;
  mask = tokens_.Mask(config_.causal, config_.window, host.document_starts);
  if (plan_.documents_max() > 0) {
    const int64_t padding = tokens_.padded_context - tokens_.context;
    mask.documents_max = plan_.documents_max() + (padding > 0 ? 1 : 0);
    mask.document_length_max = std::max(plan_.document_tokens_max(), padding);
  }
  batch.loss_and_count = StepScalarsView(scalars_.data()).LossAndCount();
  return batch;
}

absl::StatusOr<StepResult> TrainStep::Run(int64_t step, absl::Span<const HostTokens> micro_steps) {
  const v1::OptimizerSpec& spec = plan_.spec().optimizer();
  UPIPE_CHECK(static_cast<int64_t>(micro_steps.size()) ==
              plan_.spec().train().gradient_accumulation())
      << micro_steps.size() << " micro-steps; the plan says "
      << plan_.spec().train().gradient_accumulation();
  UPIPE_RETURN_IF_ERROR(ClearScalars());
  parameters_->BeginGradients();
  for (const HostTokens& host : micro_steps) {
    parameters_->AwaitLeft();
    UPIPE_RETURN_IF_ERROR(context_.Settle());
    context_.Mark(step, StepPass::kEmbed, -1, -1);
    UPIPE_RETURN_IF_ERROR(model_->ForwardBackward(Upload(host), step));
  }
  context_.Mark(step, StepPass::kOptimizer, -1, -1);
  UPIPE_RETURN_IF_ERROR(parameters_->ReduceOverReplicas());
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
  UPIPE_RETURN_IF_ERROR(context_.Settle());
  context_.Mark(step, StepPass::kEvaluate, -1, -1);
  UPIPE_RETURN_IF_ERROR(ClearScalars());
  UPIPE_RETURN_IF_ERROR(model_->Evaluate(Upload(host), step));
  UPIPE_RETURN_IF_ERROR(Reduce(StepScalarsView::kNumReduced, comm::ReduceOp::kSum));
  UPIPE_ASSIGN_OR_RETURN(const StepScalars scalars, ReadScalars());
  return scalars.by_position;
}

absl::StatusOr<BoundaryVote> TrainStep::Vote(const BoundaryVote& mine) {
  UPIPE_RETURN_IF_ERROR(context_.Settle());
  vote_ = {mine.stop ? 1.0 : 0.0, mine.writing ? 1.0 : 0.0, static_cast<double>(mine.failed_step),
           static_cast<double>(mine.sealed_step)};
  kernels::Stream& stream = context_.stream();
  context_.device().CopyFromHost(scalars_.data(), vote_.data(), sizeof(vote_), stream);
  UPIPE_RETURN_IF_ERROR(Reduce(vote_.size(), comm::ReduceOp::kMax));
  context_.device().CopyToHost(vote_.data(), scalars_.data(), sizeof(vote_), stream);
  UPIPE_RETURN_IF_ERROR(stream.Synchronize());
  return BoundaryVote{.stop = vote_[0] != 0,
                      .writing = vote_[1] != 0,
                      .failed_step = static_cast<int64_t>(vote_[2]),
                      .sealed_step = static_cast<int64_t>(vote_[3])};
}

absl::StatusOr<std::vector<checkpoint::MemoryPiece>> TrainStep::TakeSnapshot() {
  UPIPE_CHECK(snapshot_.has_value()) << "a snapshot without a checkpoint path";
  UPIPE_RETURN_IF_ERROR(snapshot_->Take(context_, *parameters_));
  return snapshot_->pieces();
}

absl::Status TrainStep::Restore(const checkpoint::Checkpoint& from, const std::atomic<bool>* stop) {
  UPIPE_RETURN_IF_ERROR(RestoreShards(context_, *parameters_, from.content(), stop));
  applied_steps_ = from.manifest().state().applied_steps();
  return absl::OkStatus();
}

absl::Status TrainStep::ClearScalars() {
  const engine::Timed timed(context_, engine::StageName::kOptimizer);
  return context_.Fill(
      TensorView::Vector(scalars_.data(), DType::kFloat64, StepScalarsView::kNumReduced), 0);
}

absl::Status TrainStep::Reduce(int64_t count, comm::ReduceOp op) {
  UPIPE_ASSIGN_OR_RETURN(
      kernels::Buffer scratch,
      context_.Allocate(MemoryTag::kComm, context_.comm().AllReduceScratchBytes(count)));
  return context_.comm().AllReduce(static_cast<double*>(scalars_.data()), count, op, scratch.data(),
                                   context_.stream());
}

absl::StatusOr<StepScalars> TrainStep::ReadScalars() {
  const engine::Timed timed(context_, engine::StageName::kOptimizer);
  StepScalars scalars;
  context_.device().CopyToHost(&scalars, scalars_.data(), sizeof(scalars), context_.stream());
  UPIPE_RETURN_IF_ERROR(context_.stream().Synchronize());
  return scalars;
}

}  // namespace upipe::train
