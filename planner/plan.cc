#include "planner/plan.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/rounding.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/data/sequence_source.h"
#include "engine/parallel/plan_hash.h"
#include "engine/train/rank_run.h"
#include "engine/train/step.h"
#include "kernels/api/attention_pairs.h"
#include "kernels/cpu/isa.h"
#include "kernels/device_factory.h"
#include "planner/notes.h"

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

// u of the method: query heads per rank and stage.
int64_t HeadsPerRank(const v1::JobSpec& spec, int ulysses_ranks) {
  if (spec.parallel().method() != v1::METHOD_UPIPE) {
    return parallel::UlyssesHeadsPerRank(spec.model().num_heads(), ulysses_ranks);
  }
  return spec.parallel().heads_per_stage() / ulysses_ranks;
}

absl::StatusOr<v1::HeadChunkSchedule> MakeSchedule(const v1::JobSpec& spec) {
  const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
  return parallel::MakeHeadChunkSchedule({.num_heads = spec.model().num_heads(),
                                          .num_kv_heads = spec.model().num_kv_heads(),
                                          .ulysses_ranks = mesh.ulysses_ranks,
                                          .heads_per_rank = HeadsPerRank(spec, mesh.ulysses_ranks),
                                          .ring_ranks = mesh.ring_ranks,
                                          .query_chunks = spec.memory().query_chunks(),
                                          .overlap = spec.memory().overlap()});
}

// Of one step, in sequences of one document. Multiply-adds of weights count 6 per parameter and
// token, attention 12 H D per layer and pair of a query and a key it sees.
double ModelFlops(const v1::JobSpec& spec) {
  const v1::ModelSpec& m = spec.model();
  const int64_t context = spec.train().context();
  kernels::AttentionMask mask = {
      .causal = m.causal(),
      .document_starts = std::make_shared<const std::vector<int64_t>>(1, 0),
      .total = context};
  if (m.has_window()) mask.window = m.window();
  const kernels::PositionRun all = {0, context};
  const auto pairs = static_cast<double>(kernels::VisiblePairs(mask, all, all));
  const auto d = static_cast<double>(m.hidden_size());
  const auto heads = static_cast<double>(m.num_heads() * m.head_dim());
  const auto layers = static_cast<double>(m.num_layers());
  const double block = d * heads * 2 +
                       d * static_cast<double>(2 * m.num_kv_heads() * m.head_dim()) +
                       3 * d * static_cast<double>(m.intermediate_size());
  const double weights = layers * block + d * static_cast<double>(m.vocab_size());
  return static_cast<double>(train::SequencesPerStep(spec)) *
         (6 * weights * static_cast<double>(context) + layers * 12 * heads * pairs);
}

// From here on a step's micro-steps are not all run dry: those between the first and the last are
// alike, so each adds what one more than kDryMicroSteps - 1 adds.
constexpr int64_t kDryMicroSteps = 4;

absl::StatusOr<v1::RankPlan> PriceRank(const v1::RunPlan& plan, int rank) {
  const int64_t micro_steps = plan.spec().train().gradient_accumulation();
  const auto run = [&](int64_t number) -> absl::StatusOr<v1::RankPlan> {
    v1::RunPlan shorter;
    *shorter.mutable_spec() = plan.spec();
    *shorter.mutable_schedule() = plan.schedule();
    shorter.set_schedule_hash(plan.schedule_hash());
    shorter.mutable_spec()->mutable_train()->set_gradient_accumulation(number);
    UPIPE_ASSIGN_OR_RETURN(RankDryRun dry, DryRunRank(shorter, rank));
    return std::move(dry.rank);
  };
  if (micro_steps <= kDryMicroSteps) return run(micro_steps);
  UPIPE_ASSIGN_OR_RETURN(const v1::RankPlan before, run(kDryMicroSteps - 1));
  UPIPE_ASSIGN_OR_RETURN(v1::RankPlan result, run(kDryMicroSteps));
  const int64_t more = micro_steps - kDryMicroSteps;
  for (int peer = 0; peer < result.bytes_sent_to_peer_size(); ++peer) {
    const int64_t each = result.bytes_sent_to_peer(peer) - before.bytes_sent_to_peer(peer);
    result.set_bytes_sent_to_peer(peer, result.bytes_sent_to_peer(peer) + more * each);
  }
  const double each = result.step_flops() - before.step_flops();
  result.set_step_flops(result.step_flops() + static_cast<double>(more) * each);
  return result;
}

// What a rank takes from the machine. On cpu and reference, the backends there are, device and host
// memory are the same RAM.
int64_t BytesTaken(const v1::RankPlan& rank) {
  return rank.memory().arena_bytes() + rank.host_memory().arena_bytes();
}

std::string WhatWouldHelp(const v1::RunPlan& plan) {
  const v1::JobSpec& spec = plan.spec();
  const v1::MemorySpec& memory = spec.memory();
  const int ulysses = plan.schedule().ulysses_ranks();
  std::vector<std::string> ways = {
      absl::StrCat("more ranks than ", spec.parallel().ranks()),
      absl::StrCat("a context shorter than ", FormatTokenCount(spec.train().context()))};
  if (plan.schedule().heads_per_rank() > 1) {
    ways.push_back(absl::StrCat("method upipe with heads_per_stage ", ulysses));
  }
  if (memory.query_chunks() <= 512) {
    ways.push_back(absl::StrCat("query_chunks ", 2 * memory.query_chunks()));
  }
  if (memory.attention_output() != v1::ATTENTION_OUTPUT_RECOMPUTE) {
    ways.push_back("attention_output recompute");
  }
  if (memory.ring_kv() == v1::RING_KV_KEEP) ways.push_back("ring_kv pass");
  if (memory.overlap()) ways.push_back("overlap off");
  // Inputs of layers held at a time: those that are kept and those of one group.
  const auto held = [&](int64_t stride) {
    return CeilDiv(spec.model().num_layers(), stride) + stride - 1;
  };
  const int64_t stride = memory.checkpoint_stride();
  if (held(stride + 1) < held(stride)) {
    ways.push_back(absl::StrCat("checkpoint_stride ", stride + 1));
  }
  if (spec.parallel().dp_ranks() > 1) ways.push_back("fsdp_ranks in place of dp_ranks");
  const std::string last = ways.back();
  ways.pop_back();
  return absl::StrCat(absl::StrJoin(ways, ", "), " or ", last,
                      " would help; layer_inputs, hidden_stream, stage_kv or optimizer on the host "
                      "would not on backend ",
                      spec.parallel().backend(), ", where host memory is the same RAM");
}

absl::Status CheckFits(const v1::RunPlan& plan, int64_t available) {
  const v1::RankPlan& fullest =
      *std::max_element(plan.ranks().begin(), plan.ranks().end(),
                        [](const auto& a, const auto& b) { return BytesTaken(a) < BytesTaken(b); });
  const int64_t needed = BytesTaken(fullest);
  if (needed <= available) return absl::OkStatus();
  const int64_t on_host = fullest.host_memory().arena_bytes();
  const bool mostly_host = on_host > fullest.memory().arena_bytes();
  const v1::MemoryUsage& memory = mostly_host ? fullest.host_memory() : fullest.memory();
  const v1::TagBytes& largest = *std::max_element(
      memory.tags().begin(), memory.tags().end(),
      [](const auto& a, const auto& b) { return a.at_peak_bytes() < b.at_peak_bytes(); });
  const std::string both =
      on_host == 0 ? ""
                   : absl::StrCat(", ", FormatBytes(fullest.memory().arena_bytes()),
                                  " as the device's and ", FormatBytes(on_host), " as the host's");
  return absl::ResourceExhaustedError(absl::StrCat(
      "rank ", fullest.rank(), " needs ", FormatBytes(needed), " (", needed, " bytes", both,
      ") and may take ", FormatBytes(available), " (", available, " bytes); at the peak ",
      mostly_host ? "of the host's " : "", "(", memory.peak_moment(), ") the largest category is ",
      largest.tag(), " with ", FormatBytes(largest.at_peak_bytes()), "; ", WhatWouldHelp(plan)));
}

}  // namespace

absl::StatusOr<RankDryRun> DryRunRank(const v1::RunPlan& plan, int rank) {
  const v1::JobSpec& spec = plan.spec();
  UPIPE_ASSIGN_OR_RETURN(auto device, kernels::CreateDryDevice(spec.parallel().backend()));
  comm::DryCommunicator comm(rank, spec.parallel().ranks());
  const engine::RankStreams streams = engine::RankStreams::Create(*device, rank);
  const engine::RankContext context({.device = *device,
                                     .streams = streams,
                                     .comm = comm,
                                     .storage = model::StorageTypeOf(spec.train()),
                                     .mesh = parallel::Mesh::From(spec.parallel())});
  UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, plan));
  device->ResetCounts();
  const comm::CommStats before = comm.stats();
  UPIPE_RETURN_IF_ERROR(step->Vote({}).status());
  const std::vector<train::HostTokens> micro_steps(spec.train().gradient_accumulation());
  UPIPE_RETURN_IF_ERROR(step->Run(1, micro_steps).status());
  const comm::CommStats after = comm.stats();
  RankDryRun result;
  result.counts = device->counts();
  if (spec.train().eval_sequences() > 0) UPIPE_RETURN_IF_ERROR(step->Evaluate(1, {}).status());
  result.rank.set_rank(rank);
  *result.rank.mutable_memory() = train::ToMessage(device->allocator().stats());
  *result.rank.mutable_host_memory() = train::ToMessage(device->host_allocator().stats());
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
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_schedule(), MakeSchedule(full));
  plan.set_schedule_hash(parallel::HashOf(plan.schedule()));
  const parallel::TokenMap tokens = train::TokensOf(full);
  plan.set_padded_context(tokens.padded_context);
  plan.set_tokens_per_rank(tokens.tokens_per_rank);
  const parallel::Mesh mesh = parallel::Mesh::From(full.parallel());
  plan.set_num_parameters(
      model::ParameterLayout::Make(model::ModelConfig::From(full.model(), full.train().context()),
                                   mesh.shard_ranks(), mesh.dp_ranks)
          .num_parameters);
  plan.set_model_flops(ModelFlops(full));
  for (int rank = 0; rank < full.parallel().ranks(); ++rank) {
    UPIPE_ASSIGN_OR_RETURN(*plan.add_ranks(), PriceRank(plan, rank));
  }
  plan.set_attention_kernel(
      absl::StrCat(full.parallel().backend(), " own ", NameOf(model::StorageTypeOf(full.train()))));
  for (std::string& note : PlanNotes(plan)) plan.add_notes(std::move(note));
  const int64_t available =
      full.train().has_memory_per_rank()
          ? std::min(limits.memory_per_rank_bytes, full.train().memory_per_rank())
          : limits.memory_per_rank_bytes;
  UPIPE_RETURN_IF_ERROR(CheckFits(plan, available));
  plan.set_plan_hash(parallel::HashOf(plan));
  return plan;
}

}  // namespace upipe::planner
