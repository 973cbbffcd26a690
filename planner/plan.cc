#include "planner/plan.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/data/sequence_source.h"
#include "engine/parallel/plan_hash.h"
#include "engine/train/rank_run.h"
#include "engine/train/step.h"
#include "kernels/cpu/isa.h"
#include "kernels/device_factory.h"

namespace upipe::planner {
namespace {

absl::Status CheckSpec(const v1::JobSpec& spec) {
  const std::vector<Violation> violations = ValidateJobSpec(spec);
  if (violations.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrJoin(violations, "; ", [](std::string* out, const Violation& v) {
        absl::StrAppend(out, v.field, ": ", v.message);
      }));
}

absl::Status CheckShard(const v1::JobSpec& spec, const char* name) {
  const std::string path = absl::StrCat(spec.data().path(), "/", name);
  UPIPE_ASSIGN_OR_RETURN(data::TokenShard shard, data::TokenShard::Open(path));
  if (shard.vocab_size() > spec.model().vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has a vocabulary of ", shard.vocab_size(), " tokens and model.vocab_size is ",
        spec.model().vocab_size(), "; raise it to at least ", shard.vocab_size()));
  }
  return data::SequenceSource::Create(std::move(shard), spec.train().context(), spec.train().seed())
      .status();
}

absl::Status CheckData(const v1::JobSpec& spec) {
  UPIPE_RETURN_IF_ERROR(CheckShard(spec, data::kTrainShardName));
  if (spec.train().eval_sequences() == 0) return absl::OkStatus();
  return CheckShard(spec, data::kHeldOutShardName);
}

int64_t HeadsPerRank(const v1::JobSpec& spec) {
  const auto& parallel = spec.parallel();
  if (parallel.method() == v1::METHOD_ULYSSES) {
    return parallel::UlyssesHeadsPerRank(spec.model().num_heads(), parallel.ranks());
  }
  return parallel.heads_per_stage() / parallel.ranks();
}

// Multiply-adds of weights count 6 per parameter and token, attention 3 x 2 H D L^2 per layer
// (causal).
double ModelFlops(const v1::ModelSpec& m, int64_t context) {
  const auto d = static_cast<double>(m.hidden_size());
  const auto tokens = static_cast<double>(context);
  const auto heads = static_cast<double>(m.num_heads() * m.head_dim());
  const double block = d * heads * 2 +
                       d * static_cast<double>(2 * m.num_kv_heads() * m.head_dim()) +
                       3 * d * static_cast<double>(m.intermediate_size());
  const double weights =
      static_cast<double>(m.num_layers()) * block + d * static_cast<double>(m.vocab_size());
  return 6 * weights * tokens + static_cast<double>(m.num_layers()) * 6 * heads * tokens * tokens;
}

absl::Status CheckFits(const v1::RunPlan& plan, int64_t available) {
  auto fullest =
      std::max_element(plan.ranks().begin(), plan.ranks().end(), [](const auto& a, const auto& b) {
        return a.memory().arena_bytes() < b.memory().arena_bytes();
      });
  const v1::MemoryUsage& memory = fullest->memory();
  if (memory.arena_bytes() <= available) return absl::OkStatus();
  auto largest = std::max_element(
      memory.tags().begin(), memory.tags().end(),
      [](const auto& a, const auto& b) { return a.at_peak_bytes() < b.at_peak_bytes(); });
  const int ranks = plan.spec().parallel().ranks();
  std::string help = absl::StrCat("more ranks than ", ranks, " or a context shorter than ",
                                  FormatTokenCount(plan.spec().train().context()));
  if (plan.schedule().heads_per_rank() > 1) {
    absl::StrAppend(&help, " or upipe with heads_per_stage ", ranks);
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "rank ", fullest->rank(), " needs ", FormatBytes(memory.arena_bytes()), " (",
      memory.arena_bytes(), " bytes) and may take ", FormatBytes(available), " (", available,
      " bytes); at the peak (", memory.peak_moment(), ") the largest category is ", largest->tag(),
      " with ", FormatBytes(largest->at_peak_bytes()), "; ", help, " would help"));
}

}  // namespace

absl::StatusOr<RankDryRun> DryRunRank(const v1::RunPlan& plan, int rank) {
  UPIPE_ASSIGN_OR_RETURN(auto device, kernels::CreateDryDevice(plan.spec().parallel().backend()));
  comm::DryCommunicator comm(rank, plan.spec().parallel().ranks());
  const auto stream = device->CreateStream("compute");
  const engine::RankContext context(*device, *stream, comm, nullptr,
                                    model::StorageTypeOf(plan.spec().train()));
  UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, plan));
  device->ResetCounts();
  const comm::CommStats before = comm.stats();
  UPIPE_RETURN_IF_ERROR(step->AnyRank(false).status());
  UPIPE_RETURN_IF_ERROR(step->Run(1, {}).status());
  const comm::CommStats after = comm.stats();
  RankDryRun result;
  result.counts = device->counts();
  if (plan.spec().train().eval_sequences() > 0) {
    UPIPE_RETURN_IF_ERROR(step->Evaluate(1, {}).status());
  }
  result.rank.set_rank(rank);
  *result.rank.mutable_memory() = train::ToMessage(device->allocator().stats());
  for (size_t peer = 0; peer < after.bytes_sent_to_peer.size(); ++peer) {
    result.rank.add_bytes_sent_to_peer(after.bytes_sent_to_peer[peer] -
                                       before.bytes_sent_to_peer[peer]);
  }
  result.rank.set_step_flops(result.counts.total.cost.flops);
  return result;
}

absl::StatusOr<v1::RunPlan> MakeRunPlan(const v1::JobSpec& spec, const PlanLimits& limits) {
  UPIPE_RETURN_IF_ERROR(CheckSpec(spec));
  v1::RunPlan plan;
  *plan.mutable_spec() = WithDefaults(spec);
  const v1::JobSpec& full = plan.spec();
  if (const std::string& cap = full.parallel().isa_cap(); !cap.empty()) {
    UPIPE_RETURN_IF_ERROR(kernels::CheckIsaName(cap));
  }
  if (limits.check_data) UPIPE_RETURN_IF_ERROR(CheckData(full));
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_schedule(), parallel::MakeHeadChunkSchedule(
                                                       {.num_heads = full.model().num_heads(),
                                                        .num_kv_heads = full.model().num_kv_heads(),
                                                        .ulysses_ranks = full.parallel().ranks(),
                                                        .heads_per_rank = HeadsPerRank(full)}));
  plan.set_schedule_hash(parallel::HashOf(plan.schedule()));
  const auto tokens = parallel::TokenMap::Make(full.train().context(), full.parallel().ranks());
  plan.set_padded_context(tokens.padded_context);
  plan.set_tokens_per_rank(tokens.tokens_per_rank);
  plan.set_num_parameters(
      model::ParameterLayout::Make(model::ModelConfig::From(full.model(), full.train().context()),
                                   full.parallel().ranks())
          .num_parameters);
  plan.set_model_flops(ModelFlops(full.model(), full.train().context()));
  for (int rank = 0; rank < full.parallel().ranks(); ++rank) {
    UPIPE_ASSIGN_OR_RETURN(RankDryRun dry, DryRunRank(plan, rank));
    *plan.add_ranks() = std::move(dry.rank);
  }
  plan.set_attention_kernel(
      absl::StrCat(full.parallel().backend(), " own ", NameOf(model::StorageTypeOf(full.train()))));
  for (const std::string& warning : JobSpecWarnings(full)) plan.add_notes(warning);
  plan.add_notes("bit-identical on equal instruction set, threads per rank and library versions");
  const int64_t available =
      full.train().has_memory_per_rank()
          ? std::min(limits.memory_per_rank_bytes, full.train().memory_per_rank())
          : limits.memory_per_rank_bytes;
  UPIPE_RETURN_IF_ERROR(CheckFits(plan, available));
  plan.set_plan_hash(parallel::HashOf(plan));
  return plan;
}

}  // namespace upipe::planner
