#include "planner/pricing.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "kernels/dry/cuda_stand_in.h"
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

// Of the fullest kind of moment at `times` the context of `one`.
int64_t Peak(const MomentPeaks& one, const MomentPeaks& two, double times) {
  double peak = 0;
  for (const auto& [moment, at_two] : two) {
    const auto found = one.find(moment);
    const MomentPeak& at_one = found == one.end() ? at_two : found->second;
    const auto grown = [&](int64_t in_one, int64_t in_two) {
      return Affine(static_cast<double>(in_one), static_cast<double>(in_two), times);
    };
    double held = 0, scratch = 0;
    for (size_t tag = 0; tag < at_two.held_bytes.size(); ++tag) {
      held += grown(at_one.held_bytes[tag], at_two.held_bytes[tag]);
    }
    const bool same = at_one.scratch_bytes.size() == at_two.scratch_bytes.size();
    for (size_t i = 0; i < at_two.scratch_bytes.size(); ++i) {
      const int64_t bytes = at_two.scratch_bytes[i];
      scratch = std::max(scratch, grown(same ? at_one.scratch_bytes[i] : bytes, bytes));
    }
    peak = std::max(peak, held + scratch);
  }
  return static_cast<int64_t>(peak);
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
  pricing.measured_ = limits.measured;
  pricing.attention_kernel_ = pricing.device_.attention_kernel();
  if (cuda && full.train().deterministic()) {
    pricing.attention_kernel_ = kernels::DeterministicAttention(pricing.attention_kernel_);
  }
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
  return {.device_bytes = budget_.device_bytes(),
          .host_bytes = budget_.host_bytes(),
          .node_ranks = ranks_per_node_};
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

absl::StatusOr<v1::RunPlan> Pricing::Shape(const v1::JobSpec& spec) const {
  v1::JobSpec placed = spec;
  placed.mutable_parallel()->set_ranks_per_node(ranks_per_node_);
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan shape, PlanShape(placed));
  *shape.mutable_measured() = measured_;
  if (measured_.ops().empty()) shape.clear_measured();
  return shape;
}

absl::StatusOr<v1::RunPlan> Pricing::Plan(const v1::JobSpec& spec) const {
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, Shape(spec));
  UPIPE_ASSIGN_OR_RETURN(std::vector<RankDryRun> ranks,
                         ComposeRanks(plan, attention_kernel_, num_threads_));
  std::vector<StepCounts> counts;
  for (RankDryRun& rank : ranks) {
    *plan.add_ranks() = std::move(rank.rank);
    counts.push_back(std::move(rank.counts));
  }
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_step_time(), Time(plan, counts));
  return plan;
}

absl::StatusOr<Price> Pricing::Of(const v1::JobSpec& spec) const {
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan, Plan(spec));
  return Of(plan);
}

// Estimates. A step is made of tiles of tokens: its counts, but for attention's, are affine in the
// context, and so is what each category holds at a kind of moment, and the scratch of each
// operation. Two short contexts tell them; the peak is that of the moment that is fullest in the
// long one, which in a short one is another.
absl::StatusOr<Price> Pricing::Estimate(const v1::JobSpec& spec) const {
  const ContextRanks ranks = *ContextRanksOf(spec.parallel());
  const int64_t tokens = std::max(kShortTokens, kChunkTokens * spec.memory().query_chunks());
  const int64_t context = spec.train().context();
  if (context <= 3 * tokens * ranks.total()) return Of(spec);
  v1::JobSpec shorter = spec;
  std::vector<v1::RunPlan> shapes;
  for (int i = 1; i <= 2; ++i) {
    shorter.mutable_train()->set_context(i * tokens * ranks.total());
    UPIPE_ASSIGN_OR_RETURN(shapes.emplace_back(), Shape(shorter));
  }
  const double times = static_cast<double>(context) / static_cast<double>(tokens * ranks.total());
  UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, Shape(spec));
  for (int rank = 0; rank < spec.parallel().ranks(); ++rank) plan.add_ranks()->set_rank(rank);
  std::vector<StepCounts> whole;
  for (const std::vector<int>& alike : RanksOfSameHeads(plan)) {
    UPIPE_ASSIGN_OR_RETURN(const std::vector<Outline> outlines,
                           OutlinesOf(shapes, alike[0], attention_kernel_));
    const Outline &one = outlines[0], &two = outlines[1];
    for (const int rank : alike) {
      v1::RankPlan& sum = *plan.mutable_ranks(rank);
      sum.mutable_memory()->set_arena_bytes(Peak(one.device, two.device, times) + two.unused_bytes);
      sum.mutable_host_memory()->set_arena_bytes(Peak(one.host, two.host, times));
    }
    whole.push_back(CountsAt(one.counts, two.counts, times));
  }
  UPIPE_ASSIGN_OR_RETURN(*plan.mutable_step_time(), Time(plan, whole));
  return Of(plan);
}

}  // namespace upipe::planner
