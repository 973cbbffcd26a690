#include "planner/explore.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/rounding.h"
#include "common/spec/job_spec.h"
#include "common/spec/spec_checker.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/pricing.h"
#include "planner/search.h"

namespace upipe::planner {
namespace {

constexpr int64_t kShortest = 1024;  // tokens per context rank
constexpr int kMostRanks = 1024;

void Tell(const Progress& progress, const std::string& line) {
  if (progress != nullptr) progress(line);
}

v1::JobSpec WithContext(v1::JobSpec spec, int64_t context) {
  spec.mutable_train()->set_context(context);
  return spec;
}

// Whether something of `spec` fits, by estimates.
absl::StatusOr<bool> SeemsToFit(const v1::JobSpec& spec, const PlanLimits& limits) {
  UPIPE_ASSIGN_OR_RETURN(const Pricing pricing, Pricing::For(spec, limits));
  UPIPE_ASSIGN_OR_RETURN(const auto found, AnythingThatFits(WithDefaults(spec), pricing.pricer(),
                                                            pricing.room(), limits.num_threads));
  return found.has_value();
}

PlanLimits WithoutAdvice(PlanLimits limits) {
  limits.advise = false;
  return limits;
}

}  // namespace

absl::StatusOr<v1::RunPlan> PlanLongestContext(const v1::JobSpec& spec, const PlanLimits& limits,
                                               const Progress& progress) {
  const v1::ParallelSpec parallel = WithParallelDefaults(spec.parallel());
  const int64_t unit =
      kShortest * parallel.ranks() / (int64_t{parallel.fsdp_ranks()} * parallel.dp_ranks());
  const auto fits = [&](int64_t context) -> absl::StatusOr<bool> {
    UPIPE_ASSIGN_OR_RETURN(const bool fits, SeemsToFit(WithContext(spec, context), limits));
    Tell(progress,
         absl::StrCat(FormatTokenCount(context), " tokens ", fits ? "fit" : "do not fit"));
    return fits;
  };
  UPIPE_ASSIGN_OR_RETURN(
      const int64_t longest,
      LargestThatFits(unit, std::max(unit, spec.train().context()), kMaxContext, fits));
  // What is told is planned exactly: an estimate may have been too low, by ever more than thought.
  int64_t less = RoundUp(longest / 128, unit);
  for (int64_t context = longest; context >= unit; context -= less, less *= 2) {
    auto plan = MakeRunPlan(WithContext(spec, context), WithoutAdvice(limits));
    if (!absl::IsResourceExhausted(plan.status())) return plan;
    Tell(progress, absl::StrCat(FormatTokenCount(context), " tokens do not fit after all"));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("no context fits, not even ", FormatTokenCount(unit),
                   ": what does not depend on it is too large; use more ranks, or put the "
                   "optimizer on the host"));
}

absl::StatusOr<v1::JobSpec> WithFewestRanks(const v1::JobSpec& spec, const PlanLimits& limits,
                                            const Progress& progress) {
  UPIPE_ASSIGN_OR_RETURN(const Pricing pricing, Pricing::For(spec, limits));
  // As many to a node as the device description, or the job, says; not what the ranks of now fill.
  const int described = spec.parallel().has_ranks_per_node() ? spec.parallel().ranks_per_node()
                                                             : pricing.device().devices_per_node();
  const int node = pricing.one_ram() ? 1 : std::max(1, described);
  const v1::ParallelSpec parallel = WithParallelDefaults(spec.parallel());
  const int groups = parallel.fsdp_ranks() * parallel.dp_ranks();
  std::vector<int> counts;
  for (int ranks = 1; ranks <= kMostRanks; ++ranks) {
    if (ranks % groups == 0 && (ranks < node ? node % ranks == 0 : ranks % node == 0))
      counts.push_back(ranks);
  }
  const auto with = [&](int ranks) {
    v1::JobSpec asked = spec;
    asked.mutable_parallel()->set_ranks(ranks);
    asked.mutable_parallel()->clear_ranks_per_node();
    if (!pricing.one_ram()) asked.mutable_parallel()->set_ranks_per_node(std::min(ranks, node));
    return asked;
  };
  const auto fits = [&](int64_t index) -> absl::StatusOr<bool> {
    const v1::JobSpec asked = with(counts[index - 1]);
    if (!ValidateJobSpec(asked).empty()) return false;
    UPIPE_ASSIGN_OR_RETURN(const bool fits, SeemsToFit(asked, limits));
    Tell(progress, absl::StrCat(counts[index - 1], " ranks ", fits ? "are enough" : "are too few"));
    return fits;
  };
  for (size_t i = 1; i <= counts.size(); ++i) {
    UPIPE_ASSIGN_OR_RETURN(const bool enough, fits(static_cast<int64_t>(i)));
    if (enough) return with(counts[i - 1]);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("no number of ranks up to ", kMostRanks, " fits a context of ",
                   FormatTokenCount(spec.train().context()), " with what is written"));
}

std::vector<int64_t> SweepContexts(int64_t first, int64_t last) {
  std::vector<int64_t> contexts;
  for (int64_t context = first; context < last; context *= 2) contexts.push_back(context);
  contexts.push_back(last);
  return contexts;
}

absl::StatusOr<std::vector<SweepPlan>> Sweep(const v1::JobSpec& spec,
                                             const std::vector<int64_t>& contexts,
                                             const PlanLimits& limits, const Progress& progress) {
  std::vector<SweepPlan> points;
  for (const int64_t context : contexts) {
    SweepPlan& point = points.emplace_back();
    point.context = context;
    absl::StatusOr<v1::RunPlan> plan =
        MakeRunPlan(WithContext(spec, context), WithoutAdvice(limits));
    if (plan.ok()) {
      point.plan = *std::move(plan);
    } else if (absl::IsResourceExhausted(plan.status())) {
      point.refusal = std::string(plan.status().message());
    } else {
      return plan.status();
    }
    Tell(progress, absl::StrCat(FormatTokenCount(context), " tokens ",
                                point.refusal.empty() ? "planned" : "do not fit"));
  }
  return points;
}

}  // namespace upipe::planner
