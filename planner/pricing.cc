#include "planner/pricing.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/compose.h"
#include "planner/device_file.h"
#include "planner/step_time.h"

namespace upipe::planner {
namespace {

// Bytes of one device that no arena can have.
int64_t ReservedBytes(const v1::DeviceFile& device, int64_t memory) {
  return device.context().bytes() + device.communicator().bytes() +
         static_cast<int64_t>(device.fragmentation().value() * static_cast<double>(memory));
}

// Tokens of a rank, and of it in a query chunk, in the shorter of two steps an estimate is made of.
constexpr int64_t kShortTokens = 8192;
constexpr int64_t kChunkTokens = 512;

// At `times` the context of `one`; `two` has twice that.
double Affine(double one, double two, double times) { return one + (times - 1) * (two - one); }

// All categories at their fullest, attention's together at theirs. What the tiles of the MLP and
// the loss hold is freed before attention's is there.
double FullestTogether(const v1::MemoryUsage& memory) {
  auto bytes = static_cast<double>(memory.attention_peak_bytes());
  for (const v1::TagBytes& tag : memory.tags()) {
    if (absl::StartsWith(tag.tag(), "attn_") || tag.tag() == "mlp" || tag.tag() == "logits") {
      continue;
    }
    bytes += static_cast<double>(tag.peak_bytes());
  }
  return bytes;
}

int64_t BytesAt(const v1::MemoryUsage& one, const v1::MemoryUsage& two, double times) {
  const double together = Affine(FullestTogether(one), FullestTogether(two), times);
  const double peak =
      Affine(static_cast<double>(one.arena_bytes()), static_cast<double>(two.arena_bytes()), times);
  return static_cast<int64_t>(std::max(together, peak));
}

bool IsAttention(const kernels::DryCalls& calls) {
  return calls.op == kernels::kOpIndex<kernels::AttentionFwdParams> ||
         calls.op == kernels::kOpIndex<kernels::AttentionBwdParams>;
}

// Everything affine, but attention: as often as in `two`, over times / 2 as many keys.
StepCounts CountsAt(const StepCounts& one, const StepCounts& two, double times) {
  const double longer = times / 2;
  StepCounts whole = two;
  const auto rounds = static_cast<int64_t>(times - 2 + 0.5);
  whole.AddTimes(two, rounds);
  whole.AddTimes(one, -rounds);
  for (auto& [section, counts] : whole.sections) {
    kernels::DryCounts ops;
    ops.copies_to_host = counts.ops.copies_to_host;
    ops.bytes_to_host = counts.ops.bytes_to_host;
    ops.copies_from_host = counts.ops.copies_from_host;
    ops.bytes_from_host = counts.ops.bytes_from_host;
    for (const auto& kinds : counts.ops.by_kind()) {
      for (const kernels::DryCalls& calls : kinds) {
        if (!IsAttention(calls)) ops.Add(calls);
      }
    }
    const auto found = two.sections.find(section);
    if (found != two.sections.end()) {
      for (const auto& kinds : found->second.ops.by_kind()) {
        for (kernels::DryCalls calls : kinds) {
          if (!IsAttention(calls)) continue;
          calls.cost.flops *= longer * longer;
          calls.cost.bytes_read *= longer;
          calls.cost.bytes_written *= longer;
          calls.extent = static_cast<int64_t>(static_cast<double>(calls.extent) * longer);
          ops.Add(calls);
        }
      }
    }
    counts.ops = ops;
  }
  return whole;
}

}  // namespace

absl::StatusOr<Pricing> Pricing::For(const v1::JobSpec& spec, const PlanLimits& limits) {
  const v1::JobSpec full = WithDefaults(spec);
  const v1::ParallelSpec& parallel = full.parallel();
  Pricing pricing;
  pricing.num_threads_ = limits.num_threads;
  if (limits.device != nullptr) {
    pricing.device_ = *limits.device;
  } else {
    UPIPE_ASSIGN_OR_RETURN(pricing.device_, FindDevice(parallel.device(), limits.device_folder));
  }
  const bool cuda = parallel.backend() == "cuda";
  if (cuda != (pricing.device_.backend() == "cuda")) {
    return absl::InvalidArgumentError(absl::StrCat(
        "device ", pricing.device_.name(), " is of backend ", pricing.device_.backend(),
        " and parallel.backend is ", parallel.backend(), "; name another device or backend"));
  }
  pricing.one_ram_ = !cuda;
  pricing.ranks_per_node_ = parallel.ranks_per_node();
  if (pricing.ranks_per_node_ == 0) {
    // On cuda as many as a node has devices, or fewer, so that every node has as many.
    int per_node = parallel.ranks();
    if (cuda) per_node = std::clamp(pricing.device_.devices_per_node(), 1, parallel.ranks());
    while (parallel.ranks() % per_node != 0) --per_node;
    pricing.ranks_per_node_ = per_node;
  }
  int64_t memory = limits.memory_per_rank_bytes;
  if (cuda && memory == PlanLimits::kUnlimited) {
    memory = pricing.device_.memory().bytes();
  }
  v1::MemoryBudget& budget = pricing.budget_;
  budget.set_reserved_bytes(cuda ? ReservedBytes(pricing.device_, memory) : 0);
  budget.set_device_bytes(memory - budget.reserved_bytes());
  if (full.train().has_memory_per_rank()) {
    budget.set_device_bytes(std::min(budget.device_bytes(), full.train().memory_per_rank()));
  }
  if (budget.device_bytes() <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("device memory of ", FormatBytes(memory), " is no more than the ",
                     FormatBytes(budget.reserved_bytes()), " that device ", pricing.device_.name(),
                     " keeps for context, communicators and fragmentation"));
  }
  if (cuda) {
    budget.set_host_bytes(limits.host_memory_bytes > 0 ? limits.host_memory_bytes
                                                       : pricing.device_.host_memory().bytes());
  }
  return pricing;
}

Room Pricing::room() const {
  return {.device_bytes = budget_.device_bytes(), .host_bytes = budget_.host_bytes()};
}

Price Pricing::Of(const v1::RunPlan& plan) const {
  Price price;
  price.seconds = plan.step_time().seconds();
  int64_t node_bytes = 0;
  for (int rank = 0; rank < plan.ranks_size(); ++rank) {
    const int64_t device = plan.ranks(rank).memory().arena_bytes();
    const int64_t host = plan.ranks(rank).host_memory().arena_bytes();
    if (rank % ranks_per_node_ == 0) node_bytes = 0;
    node_bytes += one_ram_ ? 0 : host;
    price.device_bytes = std::max(price.device_bytes, one_ram_ ? device + host : device);
    price.host_bytes = std::max(price.host_bytes, node_bytes);
  }
  return price;
}

absl::StatusOr<v1::StepTime> Pricing::Time(const v1::RunPlan& shape,
                                           const std::vector<StepCounts>& ranks) const {
  v1::StepTime slowest;
  for (const StepCounts& counts : ranks) {
    UPIPE_ASSIGN_OR_RETURN(v1::StepTime time, TimeStep(counts, StepShape::From(shape), device_));
    if (time.seconds() > slowest.seconds()) slowest = std::move(time);
  }
  return slowest;
}

absl::StatusOr<v1::RunPlan> Pricing::Composed(const v1::JobSpec& spec,
                                              std::vector<StepCounts>& counts) const {
  v1::JobSpec placed = spec;
  placed.mutable_parallel()->set_ranks_per_node(ranks_per_node_);
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, PlanShape(placed));
  UPIPE_ASSIGN_OR_RETURN(std::vector<RankDryRun> ranks,
                         ComposeRanks(plan, device_.attention_kernel()));
  for (RankDryRun& rank : ranks) {
    *plan.add_ranks() = std::move(rank.rank);
    counts.push_back(std::move(rank.counts));
  }
  return plan;
}

absl::StatusOr<Price> Pricing::Of(const v1::JobSpec& spec) const {
  std::vector<StepCounts> counts;
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, Composed(spec, counts));
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_step_time(), Time(plan, counts));
  return Of(plan);
}

// Estimates. A step is made of tiles of tokens: its counts, but for attention's, are affine in the
// context, and so is each category at its fullest. Two short contexts tell both, the peak of all
// categories together does not: in a short step it is somewhere else than in a long one.
absl::StatusOr<Price> Pricing::Estimate(const v1::JobSpec& spec) const {
  const ContextRanks ranks = *ContextRanksOf(spec.parallel());
  const int64_t tokens = std::max(kShortTokens, kChunkTokens * spec.memory().query_chunks());
  const int64_t context = spec.train().context();
  if (context <= 3 * tokens * ranks.total()) return Of(spec);
  v1::JobSpec shorter = spec;
  std::array<v1::RunPlan, 2> plans;
  std::array<std::vector<StepCounts>, 2> counts;
  for (int i = 0; i < 2; ++i) {
    shorter.mutable_train()->set_context((i + 1) * tokens * ranks.total());
    UPIPE_ASSIGN_OR_RETURN(plans[i], Composed(shorter, counts[i]));
  }
  const double times = static_cast<double>(context) / static_cast<double>(tokens * ranks.total());
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, PlanShape(spec));
  std::vector<StepCounts> whole;
  for (size_t rank = 0; rank < counts[0].size(); ++rank) {
    const v1::RankPlan& one = plans[0].ranks(static_cast<int>(rank));
    const v1::RankPlan& two = plans[1].ranks(static_cast<int>(rank));
    v1::RankPlan& sum = *plan.add_ranks();
    sum.mutable_memory()->set_arena_bytes(BytesAt(one.memory(), two.memory(), times));
    sum.mutable_host_memory()->set_arena_bytes(
        BytesAt(one.host_memory(), two.host_memory(), times));
    // Ranks that do alike need timing once.
    if (rank > 0 && counts[0][rank] == counts[0][rank - 1]) continue;
    whole.push_back(CountsAt(counts[0][rank], counts[1][rank], times));
  }
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_step_time(), Time(plan, whole));
  return Of(plan);
}

}  // namespace upipe::planner
