#include "planner/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/data/sequence_source.h"
#include "engine/parallel/plan_hash.h"
#include "engine/train/step.h"
#include "kernels/api/attention_pairs.h"
#include "kernels/cpu/isa.h"
#include "kernels/device_factory.h"
#include "planner/advice.h"
#include "planner/compose.h"
#include "planner/notes.h"
#include "planner/pricing.h"
#include "planner/search.h"

namespace upipe::planner {
namespace {

// Beyond so many micro-steps no rank is run whole.
constexpr int64_t kWholeMicroSteps = 4;
// How often a search is tried again with less room.
constexpr int kSearches = 4;

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

// Searches for what is auto; `plan` receives what else was looked at.
absl::StatusOr<v1::JobSpec> Choose(const v1::JobSpec& spec, const Pricing& pricing,
                                   const PlanLimits& limits, v1::RunPlan& plan) {
  SearchOptions options = {
      .room = pricing.room(), .num_threads = limits.num_threads, .progress = nullptr};
  if (limits.progress != nullptr) {
    options.progress = [&](int done, int all, int64_t priced, double best_seconds) {
      limits.progress(
          absl::StrCat(done, " of ", all, " splits, ", FormatCount(priced), " points priced",
                       best_seconds > 0 ? absl::StrFormat(", best step %.4g s", best_seconds)
                                        : std::string(", nothing fits yet")));
    };
  }
  std::mutex mutex;
  std::map<std::string, Price> known;
  const Pricer estimate = [&](const v1::JobSpec& point) -> absl::StatusOr<Price> {
    const std::string key =
        absl::StrCat(point.parallel().SerializeAsString(), "|", point.memory().SerializeAsString());
    {
      const std::lock_guard lock(mutex);
      if (const auto found = known.find(key); found != known.end()) return found->second;
    }
    UPIPE_ASSIGN_OR_RETURN(const Price price, pricing.Estimate(point));
    const std::lock_guard lock(mutex);
    return known[key] = price;
  };
  absl::StatusOr<SearchResult> found = Search(spec, estimate, options);
  // An estimate may be below what the plan takes: then with as much less room.
  for (int again = 0; again < kSearches && found.ok(); ++again) {
    UPIPE_ASSIGN_OR_RETURN(const Price exact, pricing.Of(found->best));
    if (Fits(exact, pricing.room())) break;
    const auto shrink = [](int64_t& room, int64_t estimated, int64_t taken) {
      if (taken > estimated && estimated > 0) {
        room = static_cast<int64_t>(static_cast<double>(room) * static_cast<double>(estimated) /
                                    static_cast<double>(taken));
      }
    };
    shrink(options.room.device_bytes, found->price.device_bytes, exact.device_bytes);
    shrink(options.room.host_bytes, found->price.host_bytes, exact.host_bytes);
    found = Search(spec, estimate, options);
  }
  if (absl::IsResourceExhausted(found.status())) {
    UPIPE_ASSIGN_OR_RETURN(const std::string change, NearestChange(spec, pricing));
    return absl::ResourceExhaustedError(absl::StrCat(found.status().message(), "; ", change));
  }
  UPIPE_RETURN_IF_ERROR(found.status());
  for (v1::Candidate& candidate : found->candidates) {
    *plan.add_candidates() = std::move(candidate);
  }
  plan.set_searched(found->priced);
  return std::move(found->best);
}

// Composed of short runs, then for a rank of each list shape run whole: the same numbers.
absl::Status PriceRanks(const Pricing& pricing, v1::RunPlan& plan) {
  const std::string& kernel = pricing.device().attention_kernel();
  UPIPE_ASSIGN_OR_RETURN(std::vector<RankDryRun> ranks, ComposeRanks(plan, kernel));
  std::vector<StepCounts> counts;
  for (RankDryRun& rank : ranks) {
    *plan.add_ranks() = std::move(rank.rank);
    counts.push_back(std::move(rank.counts));
  }
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_step_time(), pricing.Time(plan, counts));
  if (plan.spec().train().gradient_accumulation() > kWholeMicroSteps) return absl::OkStatus();
  for (const std::vector<int>& alike : AlikeRanks(plan)) {
    UPIPE_ASSIGN_OR_RETURN(const RankDryRun whole, DryRunRank(plan, alike[0], kernel));
    const v1::RankPlan& composed = plan.ranks(alike[0]);
    if (whole.rank.memory().SerializeAsString() == composed.memory().SerializeAsString() &&
        whole.rank.host_memory().SerializeAsString() ==
            composed.host_memory().SerializeAsString()) {
      continue;
    }
    return absl::InternalError(
        absl::StrCat("rank ", alike[0], " run whole takes ", whole.rank.memory().arena_bytes(),
                     " bytes, composed of shorter runs ", composed.memory().arena_bytes()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::RunPlan> PlanShape(const v1::JobSpec& spec) {
  v1::RunPlan plan;
  *plan.mutable_spec() = WithDefaults(spec);
  const v1::JobSpec& full = plan.spec();
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
  return plan;
}

absl::StatusOr<v1::RunPlan> MakeRunPlan(const v1::JobSpec& spec, const PlanLimits& limits) {
  UPIPE_RETURN_IF_ERROR(CheckSpec(spec));
  const v1::JobSpec full = WithDefaults(spec);
  if (const std::string& cap = full.parallel().isa_cap(); !cap.empty()) {
    UPIPE_RETURN_IF_ERROR(kernels::CheckIsaName(cap));
  }
  if (limits.must_run) UPIPE_RETURN_IF_ERROR(kernels::CheckBackend(full.parallel().backend()));
  if (limits.check_data) UPIPE_RETURN_IF_ERROR(CheckData(full));
  UPIPE_ASSIGN_OR_RETURN(const Pricing pricing, Pricing::For(full, limits));
  v1::RunPlan looked_at;
  v1::JobSpec chosen = full;
  if (HasAuto(full)) {
    UPIPE_ASSIGN_OR_RETURN(chosen, Choose(full, pricing, limits, looked_at));
  }
  chosen.mutable_parallel()->set_ranks_per_node(pricing.ranks_per_node());
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, PlanShape(chosen));
  plan.MergeFrom(looked_at);
  UPIPE_RETURN_IF_ERROR(PriceRanks(pricing, plan));
  plan.set_device(pricing.device().name());
  *plan.mutable_budget() = pricing.budget();
  plan.set_attention_kernel(absl::StrCat(full.parallel().backend(), " ",
                                         pricing.device().attention_kernel(), " ",
                                         NameOf(model::StorageTypeOf(full.train()))));
  for (std::string& note : PlanNotes(plan)) plan.add_notes(std::move(note));
  if (!Fits(pricing.Of(plan), pricing.room())) return Refusal(plan, pricing);
  plan.set_plan_hash(parallel::HashOf(plan));
  return plan;
}

}  // namespace upipe::planner
