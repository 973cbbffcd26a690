#include "planner/advice.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/in_threads.h"
#include "planner/points.h"
#include "planner/search.h"

namespace upipe::planner {
namespace {

// Of the context that is said to fit: one part in so many.
constexpr int64_t kPrecision = 16;

// `spec` with method, heads, ring and policy the planner's.
v1::JobSpec LeftToPlanner(v1::JobSpec spec) {
  v1::ParallelSpec& parallel = *spec.mutable_parallel();
  parallel.set_method(v1::METHOD_AUTO);
  parallel.clear_heads_per_stage();
  parallel.clear_ring_ranks();
  spec.clear_memory();
  spec.mutable_memory()->set_policy(v1::POLICY_CHOICE_AUTO);
  return spec;
}

// Every legal change of one field of memory or heads_per_stage, and of replicas into shards.
std::vector<Move> SingleChanges(const v1::JobSpec& spec) {
  v1::JobSpec open = spec;
  open.clear_memory();
  open.mutable_memory()->set_policy(v1::POLICY_CHOICE_AUTO);
  std::vector<Move> moves = MovesOf(spec, KnobsOf(open));
  if (spec.parallel().dp_ranks() > 1) {
    Move sharded{spec, absl::StrCat("parallel.fsdp_ranks: ",
                                    spec.parallel().dp_ranks() * spec.parallel().fsdp_ranks(),
                                    " with dp_ranks: 1")};
    sharded.spec.mutable_parallel()->set_fsdp_ranks(spec.parallel().dp_ranks() *
                                                    spec.parallel().fsdp_ranks());
    sharded.spec.mutable_parallel()->set_dp_ranks(1);
    moves.push_back(std::move(sharded));
  }
  if (spec.parallel().method() != v1::METHOD_UPIPE) return moves;
  open = spec;
  open.mutable_parallel()->set_heads_per_stage(0);
  for (v1::JobSpec& split : SplitsOf(open)) {
    const int64_t heads = split.parallel().heads_per_stage();
    if (heads >= spec.parallel().heads_per_stage()) continue;
    moves.push_back({std::move(split), absl::StrCat("parallel.heads_per_stage: ", heads)});
  }
  return moves;
}

std::string TimeText(double seconds, double before) {
  const double percent = 100 * (seconds / before - 1);
  return percent < 0.05 ? "no slower" : absl::StrFormat("%.1f %% slower", percent);
}

// The change of one field that fits and costs least time; empty where there is none. Estimates say
// in which order to look, exact prices what fits.
absl::StatusOr<std::string> FastestSingleChange(const v1::JobSpec& spec, const Pricing& pricing) {
  std::vector<Move> moves = SingleChanges(spec);
  std::vector<Price> estimates(moves.size());
  UPIPE_RETURN_IF_ERROR(
      InThreads(pricing.num_threads(), moves.size(), [&](size_t i) -> absl::Status {
        UPIPE_ASSIGN_OR_RETURN(estimates[i], pricing.Estimate(moves[i].spec));
        return absl::OkStatus();
      }));
  Room wider = pricing.room();
  wider.device_bytes =
      static_cast<int64_t>(kEstimateSlack * static_cast<double>(wider.device_bytes));
  std::vector<size_t> order;
  for (size_t i = 0; i < moves.size(); ++i) {
    if (Fits(estimates[i], wider)) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return estimates[a].seconds < estimates[b].seconds; });
  for (const size_t i : order) {
    UPIPE_ASSIGN_OR_RETURN(const Price price, pricing.Of(moves[i].spec));
    if (!Fits(price, pricing.room())) continue;
    UPIPE_ASSIGN_OR_RETURN(const Price before, pricing.Of(spec));
    return absl::StrCat(moves[i].what, " would fit, with ", FormatBytes(price.device_bytes), ", ",
                        TimeText(price.seconds, before.seconds));
  }
  return "";
}

}  // namespace

absl::StatusOr<std::string> NearestChange(const v1::JobSpec& spec, const Pricing& pricing) {
  if (!HasAuto(spec)) {
    UPIPE_ASSIGN_OR_RETURN(const std::string change, FastestSingleChange(spec, pricing));
    if (!change.empty()) return change;
  }
  const v1::JobSpec open = LeftToPlanner(spec);
  const auto fits = [&](int64_t context) -> absl::StatusOr<bool> {
    v1::JobSpec shorter = open;
    shorter.mutable_train()->set_context(context);
    UPIPE_ASSIGN_OR_RETURN(
        const auto found,
        AnythingThatFits(shorter, pricing.pricer(), pricing.room(), pricing.num_threads()));
    return found.has_value();
  };
  if (!HasAuto(spec)) {
    UPIPE_ASSIGN_OR_RETURN(const bool any, fits(spec.train().context()));
    if (any) return "parallel.method: auto with memory.policy: auto would fit";
  }
  const int64_t unit = std::max<int64_t>(1024, int64_t{256} * spec.parallel().ranks());
  UPIPE_ASSIGN_OR_RETURN(const int64_t longest,
                         LargestThatFits(unit, spec.train().context() / 2,
                                         spec.train().context() - 1, fits, kPrecision));
  if (longest > 0) {
    return absl::StrCat(
        "train.context: ", FormatTokenCount(longest), " would fit, about the longest for ",
        spec.parallel().ranks(),
        " ranks of this memory, with method and policy auto; more ranks carry more");
  }
  return absl::StrCat(
      "no shorter context would fit either: what does not depend on it is too "
      "large for ",
      spec.parallel().ranks(), " ranks of this memory");
}

absl::Status Refusal(const v1::RunPlan& plan, const Pricing& pricing, bool advise) {
  const auto taken = [&](const v1::RankPlan& rank) {
    return rank.memory().arena_bytes() + (pricing.one_ram() ? rank.host_memory().arena_bytes() : 0);
  };
  const v1::RankPlan& fullest =
      *std::max_element(plan.ranks().begin(), plan.ranks().end(),
                        [&](const auto& a, const auto& b) { return taken(a) < taken(b); });
  const Room room = pricing.room();
  const Price price = pricing.Of(plan);
  const bool device = price.device_bytes > room.device_bytes;
  const int64_t on_host = fullest.host_memory().arena_bytes();
  const bool mostly_host =
      !device || (pricing.one_ram() && on_host > fullest.memory().arena_bytes());
  const v1::MemoryUsage& memory = mostly_host ? fullest.host_memory() : fullest.memory();
  const v1::TagBytes& largest = *std::max_element(
      memory.tags().begin(), memory.tags().end(),
      [](const auto& a, const auto& b) { return a.at_peak_bytes() < b.at_peak_bytes(); });
  const int64_t needed = device ? price.device_bytes : price.host_bytes;
  const int64_t available = device ? room.device_bytes : room.host_bytes;
  const std::string both =
      !pricing.one_ram() || on_host == 0
          ? ""
          : absl::StrCat(", ", FormatBytes(fullest.memory().arena_bytes()), " as the device's and ",
                         FormatBytes(on_host), " as the host's");
  std::string change;
  if (advise) {
    UPIPE_ASSIGN_OR_RETURN(change, NearestChange(plan.spec(), pricing));
    change = absl::StrCat("; ", change);
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      device ? absl::StrCat("rank ", fullest.rank(), " needs ")
             : absl::StrCat("the ranks of a node need "),
      FormatBytes(needed), " (", needed, " bytes", both, ")", device ? "" : " of host memory",
      " and may take ", FormatBytes(available), " (", available, " bytes); at the peak ",
      mostly_host ? "of the host's " : "", "(", memory.peak_moment(), ") the largest category is ",
      largest.tag(), " with ", FormatBytes(largest.at_peak_bytes()), change));
}

}  // namespace upipe::planner
