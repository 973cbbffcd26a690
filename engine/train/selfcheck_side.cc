#include "engine/train/selfcheck_side.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "common/status.h"

namespace upipe::train {
namespace {

using model::ShardedParameters;
using optim::StepScalars;

constexpr int64_t kPartElements = int64_t{1} << 20;

// ForEachPart, and what visit writes stays.
absl::Status Change(const engine::RankContext& context, const ShardedParameters& parameters,
                    const kernels::TensorView& shard, bool write, const VisitPart& visit) {
  kernels::Stream& stream = context.stream();
  UPIPE_RETURN_IF_ERROR(stream.Synchronize());
  std::vector<float> copy;
  for (const ShardedParameters::Piece& piece : parameters.pieces()) {
    for (int64_t done = 0; done < piece.count; done += kPartElements) {
      const int64_t count = std::min(kPartElements, piece.count - done);
      const int64_t at = piece.shard_begin + done;
      auto* values = static_cast<float*>(shard.At(at));
      if (parameters.place() == engine::Place::kHost) {
        visit(piece.tensor->name, at, absl::MakeSpan(values, count));
        continue;
      }
      const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
      copy.resize(count);
      context.device().CopyToHost(copy.data(), values, bytes, stream);
      UPIPE_RETURN_IF_ERROR(stream.Synchronize());
      visit(piece.tensor->name, at, absl::MakeSpan(copy));
      if (!write) continue;
      context.device().CopyFromHost(values, copy.data(), bytes, stream);
      UPIPE_RETURN_IF_ERROR(stream.Synchronize());
    }
  }
  return absl::OkStatus();
}

absl::Status ScaleWeights(const engine::RankContext& context, const v1::ModelSpec& model,
                          const ShardedParameters& parameters) {
  return Change(context, parameters, parameters.weights(), /*write=*/true,
                [&](const std::string& tensor, int64_t, absl::Span<float> values) {
                  const double scale = WeightScale(tensor, model.tie_embeddings());
                  for (float& value : values) value = static_cast<float>(scale * value);
                });
}

// Losses and gradients of one sequence; nothing is updated.
absl::StatusOr<StepScalars::ByPosition> Probe(const engine::RankContext& context, TrainStep& step,
                                              const RankTokens& tokens) {
  UPIPE_ASSIGN_OR_RETURN(const auto losses, step.Evaluate(1, tokens.host()));
  ShardedParameters& parameters = step.parameters();
  parameters.BeginGradients();
  parameters.AwaitLeft();
  UPIPE_RETURN_IF_ERROR(context.Settle());
  UPIPE_RETURN_IF_ERROR(step.model().ForwardBackward(step.Upload(tokens.host()), 1));
  UPIPE_RETURN_IF_ERROR(parameters.ReduceOverReplicas());
  UPIPE_RETURN_IF_ERROR(context.Settle());
  return losses;
}

struct SideRun {
  const ShortJob& job;
  Side side;
  const engine::RankContext& context;
  TrainStep& step;
  SideWatch* watch;
};

absl::Status EvaluateLossParts(const SideRun& run) {
  const RankTokens first = PartsOfStep(run.job, 1, Side::kAlone, run.context.rank())[0];
  for (int part = 0; part < kLossParts; ++part) {
    UPIPE_ASSIGN_OR_RETURN(const auto losses,
                           run.step.Evaluate(1, WithLabelsOf(part, first).host()));
    if (run.watch != nullptr) run.watch->OnLossPart(optim::TotalOf(losses).loss);
  }
  return absl::OkStatus();
}

absl::Status TakeSteps(const SideRun& run) {
  // A scaled model is updated differently: it is good for one step.
  const int64_t steps = run.side == Side::kScaled ? 1 : run.job.steps;
  for (int64_t number = 1; number <= steps; ++number) {
    const std::vector<RankTokens> parts =
        PartsOfStep(run.job, number, run.side, run.context.rank());
    std::vector<HostTokens> micro_steps;
    for (const RankTokens& part : parts) micro_steps.push_back(part.host());
    UPIPE_ASSIGN_OR_RETURN(const StepResult result, run.step.Run(number, micro_steps));
    if (run.watch == nullptr) continue;
    run.watch->OnStep(result);
    if (number > 1) continue;
    UPIPE_RETURN_IF_ERROR(run.watch->OnGradients(run.context, run.step.parameters()));
  }
  return absl::OkStatus();
}

absl::Status RunProbes(const SideRun& run) {
  const std::vector<LeakProbe> probes = LeakProbesOf(run.job);
  for (size_t i = 0; i < probes.size(); ++i) {
    for (const bool changed : {false, true}) {
      const ShortSequence& sequence = changed ? probes[i].changed : probes[i].before;
      const RankTokens part = PartOf(run.job, sequence, run.side, run.context.rank());
      UPIPE_ASSIGN_OR_RETURN(const auto losses, Probe(run.context, run.step, part));
      if (run.watch == nullptr) continue;
      UPIPE_RETURN_IF_ERROR(run.watch->OnProbe({.probe = i, .changed = changed, .losses = losses},
                                               run.context, run.step.parameters()));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ForEachPart(const engine::RankContext& context, const ShardedParameters& parameters,
                         const kernels::TensorView& shard, const VisitPart& visit) {
  return Change(context, parameters, shard, /*write=*/false, visit);
}

absl::Status RunSide(const ShortJob& job, Side side, kernels::Device& device,
                     comm::Communicator& comm, SideWatch* watch) {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, PlanOf(job, side, comm.rank()));
  const engine::RankStreams streams = engine::RankStreams::Create(device, comm.rank());
  const engine::RankContext context({.device = device,
                                     .streams = streams,
                                     .comm = comm,
                                     .storage = model::StorageTypeOf(plan.spec().train()),
                                     .mesh = parallel::Mesh::From(plan.spec().parallel())});
  UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<TrainStep> step, TrainStep::Create(context, plan));
  const SideRun run{.job = job, .side = side, .context = context, .step = *step, .watch = watch};
  if (side == Side::kScaled && watch != nullptr) {
    UPIPE_RETURN_IF_ERROR(ScaleWeights(context, plan.spec().model(), step->parameters()));
  }
  if (side != Side::kJob) UPIPE_RETURN_IF_ERROR(EvaluateLossParts(run));
  UPIPE_RETURN_IF_ERROR(TakeSteps(run));
  if (side == Side::kJob) UPIPE_RETURN_IF_ERROR(RunProbes(run));
  return context.Settle();
}

}  // namespace upipe::train
