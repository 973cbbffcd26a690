#include "planner/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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
#include "kernels/backends.h"
#include "kernels/cpu/isa.h"
#include "kernels/dry/cuda_stand_in.h"
#include "planner/advice.h"
#include "planner/compose.h"
#include "planner/in_threads.h"
#include "planner/notes.h"
#include "planner/pricing.h"
#include "planner/search.h"

namespace upipe::planner {
namespace {

// Beyond so many micro-steps no rank is run whole.
constexpr int64_t kWholeMicroSteps = 4;
// How often a search is tried again when what it found takes more than its estimate.
constexpr int kSearches = 4;

absl::Status CheckSpec(const v1::JobSpec& spec) {
  const std::vector<Violation> violations = ValidateJobSpec(spec);
  if (violations.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrJoin(violations, "; ", [](std::string* out, const Violation& v) {
        absl::StrAppend(out, v.field, ": ", v.message);
      }));
}

absl::Status CheckShard(const v1::JobSpec& spec, const char* name, data::DocumentBounds& bounds) {
  const std::string path = absl::StrCat(spec.data().path(), "/", name);
  UPIPE_ASSIGN_OR_RETURN(data::TokenShard shard, data::TokenShard::Open(path));
  if (shard.vocab_size() > spec.model().vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has a vocabulary of ", shard.vocab_size(), " tokens and model.vocab_size is ",
        spec.model().vocab_size(), "; raise it to at least ", shard.vocab_size()));
  }
  if (spec.data().documents() != v1::DOCUMENTS_JOIN) {
    const data::DocumentBounds of_shard = data::DocumentBoundsOf(shard, spec.train().context());
    bounds.documents_max = std::max(bounds.documents_max, of_shard.documents_max);
    bounds.tokens_max = std::max(bounds.tokens_max, of_shard.tokens_max);
  }
  return data::SequenceSource::Create(std::move(shard), spec.train().context(), spec.train().seed())
      .status();
}

// Nothing where documents are joined.
absl::StatusOr<data::DocumentBounds> CheckData(const v1::JobSpec& spec) {
  data::DocumentBounds bounds;
  UPIPE_RETURN_IF_ERROR(CheckShard(spec, data::kTrainShardName, bounds));
  if (spec.train().eval_sequences() > 0) {
    UPIPE_RETURN_IF_ERROR(CheckShard(spec, data::kHeldOutShardName, bounds));
  }
  return bounds;
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

// Estimates of a pricing, each made once, and how far plans have been above them.
class Estimates {
 public:
  explicit Estimates(const Pricing& pricing) : pricing_(pricing) {}

  // Thread safe.
  absl::StatusOr<Price> Of(const v1::JobSpec& point) {
    UPIPE_ASSIGN_OR_RETURN(Price price, Uncorrected(point));
    price.device_bytes = static_cast<int64_t>(device_ * static_cast<double>(price.device_bytes));
    price.host_bytes = static_cast<int64_t>(host_ * static_cast<double>(price.host_bytes));
    return price;
  }
  Pricer pricer() {
    return [this](const v1::JobSpec& point) { return Of(point); };
  }

  // What the plan of one point takes beyond its estimate, all others may too.
  void Correct(const Price& estimate, const Price& exact) {
    const auto grow = [](double& factor, int64_t estimated, int64_t taken) {
      if (taken > estimated && estimated > 0) {
        factor *= static_cast<double>(taken) / static_cast<double>(estimated);
      }
    };
    grow(device_, estimate.device_bytes, exact.device_bytes);
    grow(host_, estimate.host_bytes, exact.host_bytes);
  }

 private:
  absl::StatusOr<Price> Uncorrected(const v1::JobSpec& point) {
    const std::string key =
        absl::StrCat(point.parallel().SerializeAsString(), "|", point.memory().SerializeAsString());
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = known_.find(key); found != known_.end()) return found->second;
    }
    UPIPE_ASSIGN_OR_RETURN(const Price price, pricing_.Estimate(point));
    const std::lock_guard lock(mutex_);
    return known_[key] = price;
  }

  const Pricing& pricing_;
  double device_ = 1;
  double host_ = 1;
  std::mutex mutex_;
  std::map<std::string, Price> known_;
};

// Where room is so tight that estimates cannot tell: the first point that fits exactly.
absl::StatusOr<std::optional<v1::JobSpec>> FitsAfterAll(const v1::JobSpec& spec,
                                                        const Pricing& pricing,
                                                        Estimates& estimates) {
  Room wider = pricing.room();
  wider.device_bytes =
      static_cast<int64_t>(kEstimateSlack * static_cast<double>(wider.device_bytes));
  UPIPE_ASSIGN_OR_RETURN(const std::optional<v1::JobSpec> nearly,
                         AnythingThatFits(spec, estimates.pricer(), wider, pricing.num_threads()));
  if (!nearly.has_value()) return std::nullopt;
  return AnythingThatFits(spec, pricing.exact_pricer(), pricing.room(), pricing.num_threads());
}

// The plan of what is searched for, with what else was looked at.
absl::StatusOr<v1::RunPlan> Choose(const v1::JobSpec& spec, const Pricing& pricing,
                                   const PlanLimits& limits) {
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
  Estimates estimates(pricing);
  absl::StatusOr<SearchResult> found = Search(spec, estimates.pricer(), options);
  for (int searches = 1; found.ok() && searches <= kSearches; ++searches) {
    UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, pricing.Plan(found->best));
    const Price exact = pricing.Of(plan);
    if (Fits(exact, pricing.room())) {
      plan.mutable_candidates()->Add(found->candidates.begin(), found->candidates.end());
      plan.set_searched(found->priced);
      return plan;
    }
    estimates.Correct(found->price, exact);
    found = Search(spec, estimates.pricer(), options);
  }
  if (!found.ok() && !absl::IsResourceExhausted(found.status())) return found.status();
  UPIPE_ASSIGN_OR_RETURN(auto after_all, FitsAfterAll(spec, pricing, estimates));
  if (after_all.has_value()) return pricing.Plan(*after_all);
  if (found.ok()) return pricing.Plan(found->best);  // its refusal says what it lacks
  if (!limits.advise) return found.status();
  UPIPE_ASSIGN_OR_RETURN(const std::string change, NearestChange(spec, pricing));
  return absl::ResourceExhaustedError(absl::StrCat(found.status().message(), "; ", change));
}

// Whether every op adds in a fixed order: all but cuDNN's attention backward do.
bool IsBitIdentical(const v1::JobSpec& spec, const std::string& attention_kernel) {
  return spec.parallel().backend() != "cuda" || spec.train().dtype() != v1::DTYPE_BF16 ||
         kernels::DeterministicAttention(attention_kernel) == attention_kernel;
}

// That a rank of each list shape, run whole, takes what was composed for it of short runs.
absl::Status CheckWhole(const Pricing& pricing, const v1::RunPlan& plan) {
  if (plan.spec().train().gradient_accumulation() > kWholeMicroSteps) return absl::OkStatus();
  const std::vector<std::vector<int>> groups = AlikeRanks(plan);
  return InThreads(pricing.num_threads(), groups.size(), [&](size_t i) -> absl::Status {
    const int rank = groups[i][0];
    UPIPE_ASSIGN_OR_RETURN(const RankDryRun whole,
                           DryRunRank(plan, rank, pricing.attention_kernel()));
    const v1::RankPlan& composed = plan.ranks(rank);
    if (whole.rank.memory().SerializeAsString() == composed.memory().SerializeAsString() &&
        whole.rank.host_memory().SerializeAsString() ==
            composed.host_memory().SerializeAsString()) {
      return absl::OkStatus();
    }
    return absl::InternalError(
        absl::StrCat("rank ", rank, " run whole takes ", whole.rank.memory().arena_bytes(),
                     " bytes, composed of shorter runs ", composed.memory().arena_bytes()));
  });
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
  data::DocumentBounds documents;
  if (limits.check_data) {
    UPIPE_ASSIGN_OR_RETURN(documents, CheckData(full));
  }
  UPIPE_ASSIGN_OR_RETURN(const Pricing pricing, Pricing::For(full, limits));
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan,
                         HasAuto(full) ? Choose(full, pricing, limits) : pricing.Plan(full));
  if (!Fits(pricing.Of(plan), pricing.room())) return Refusal(plan, pricing, limits.advise);
  UPIPE_RETURN_IF_ERROR(CheckWhole(pricing, plan));
  plan.set_device(pricing.device().name());
  if (model::StorageTypeOf(full.train()) == kernels::DType::kBFloat16) {
    plan.set_peak_flops(pricing.device().peak_flops().value());
  }
  *plan.mutable_budget() = pricing.budget();
  plan.set_attention_kernel(absl::StrCat(full.parallel().backend(), " ", pricing.attention_kernel(),
                                         " ", NameOf(model::StorageTypeOf(full.train()))));
  plan.set_documents_max(documents.documents_max);
  plan.set_document_tokens_max(documents.tokens_max);
  plan.set_bit_identical(IsBitIdentical(full, pricing.attention_kernel()));
  for (std::string& note : PlanNotes(plan, pricing.device())) plan.add_notes(std::move(note));
  plan.set_plan_hash(parallel::HashOf(plan));
  return plan;
}

}  // namespace upipe::planner
