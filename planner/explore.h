// Questions about many plans: the longest context, the fewest ranks, a curve over contexts. Each
// asks the search's cheap question first (does anything fit?) and plans whole only what is told.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/plan.h"

namespace upipe::planner {

// The plan of the longest context that fits, to within 1/128 of it where estimates hold.
// ResourceExhausted when not even the shortest asked about, 1K tokens per context rank, fits.
absl::StatusOr<v1::RunPlan> PlanLongestContext(const v1::JobSpec& spec, const PlanLimits& limits,
                                               const Progress& progress);

// The fewest ranks that fit the context: divisors of a node, then whole nodes up to the largest job
// there is. fsdp, dp and threads stay; method, heads and ring are the planner's where they are
// auto. ResourceExhausted when no number does.
absl::StatusOr<v1::JobSpec> WithFewestRanks(const v1::JobSpec& spec, const PlanLimits& limits,
                                            const Progress& progress);

struct SweepPlan {
  int64_t context = 0;
  v1::RunPlan plan;     // absent where it does not fit
  std::string refusal;  // why
};

// first, 2 first, 4 first, .. up to last, and last.
std::vector<int64_t> SweepContexts(int64_t first, int64_t last);
absl::StatusOr<std::vector<SweepPlan>> Sweep(const v1::JobSpec& spec,
                                             const std::vector<int64_t>& contexts,
                                             const PlanLimits& limits, const Progress& progress);

}  // namespace upipe::planner
