// One rank's training step on the dry device: the engine's own code, no arithmetic, no memory. What
// every number of a plan comes from, run whole; compose.h gets the same numbers from shorter runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "engine/rank_context.h"
#include "kernels/dry/dry_device.h"
#include "planner/step_counts.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

struct RankDryRun {
  v1::RankPlan rank;
  StepCounts counts;  // of one step
};

// Watches a dry run from its first allocation on, and is told of its moments.
class DryRunObserver : public engine::MomentObserver {
 public:
  // What is being run, which outlives it; `counts` grow as it goes on.
  struct Subject {
    kernels::DryDevice& device;
    const comm::Communicator& comm;
    const StepCounts& counts;
  };
  virtual void Start(const Subject& subject) = 0;
  // After all that the run's numbers are of; what it holds is freed later.
  virtual void Finish() = 0;
};

// A vote, one step and, where the job evaluates, one evaluation, which counts in the bytes only:
// exact bytes by tag on device and host, bytes sent to each peer, what is computed and moved.
// `plan` needs spec (with defaults), schedule and its hash, and `measured` where that is known.
// `attention_kernel` is the one scratch is counted for (kernels/backends.h).
absl::StatusOr<RankDryRun> DryRunRank(const v1::RunPlan& plan, int rank,
                                      const std::string& attention_kernel = "own",
                                      DryRunObserver* observer = nullptr);

// The part of a plan that a rank's pools, traffic and counts say.
v1::RankPlan ToRankPlan(int rank, kernels::DryDevice& device, const std::vector<int64_t>& sent,
                        const StepCounts& counts);

}  // namespace upipe::planner
