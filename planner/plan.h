// JobSpec -> RunPlan: every knob is named, so planning is one dry run of the job's own step per
// rank. The bytes come from the same code that will allocate them; nothing here estimates.
#pragma once

#include <cstdint>
#include <limits>

#include "absl/status/statusor.h"
#include "kernels/dry/dry_counts.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

struct PlanLimits {
  // What a rank may take from the machine; the job's own train.memory_per_rank lowers it.
  int64_t memory_per_rank_bytes = std::numeric_limits<int64_t>::max();
  // Opens the packed data and checks that it holds a sequence of the context and fits the
  // vocabulary.
  bool check_data = true;
};

// Pure but for reading the data's headers. InvalidArgument with every violation of the spec;
// NotFound, DataLoss or InvalidArgument about the data; ResourceExhausted naming rank, largest
// category, bytes asked and available, and what would help.
absl::StatusOr<v1::RunPlan> MakeRunPlan(const v1::JobSpec& spec, const PlanLimits& limits);

// One rank's dry step, evaluation included in its bytes: exact bytes by tag on device and host,
// bytes sent to each peer, FLOPs by op. `plan` needs spec (with defaults), schedule and its hash.
struct RankDryRun {
  v1::RankPlan rank;
  kernels::DryCounts counts;  // of one step
};
absl::StatusOr<RankDryRun> DryRunRank(const v1::RunPlan& plan, int rank);

}  // namespace upipe::planner
