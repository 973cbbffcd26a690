// Memory through one training step, moment by moment: a dry run of the job's own step whose op
// table notes what the allocator holds at every op. The same code path as planner/plan.h, so its
// highest moment is the plan's peak.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/allocator.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::report {

// The fullest instant since the op before.
struct ProfileMoment {
  std::string moment;  // "backward layer 1 stage 0"
  kernels::TagBytes bytes = {};
  int64_t total_bytes = 0;
};

// `plan` needs spec, schedule and schedule_hash, as MakeRunPlan gives it.
absl::StatusOr<std::vector<ProfileMoment>> ProfileStep(const v1::RunPlan& plan, int rank);

// At most `columns` moments: neighbours of the same pass and layer are merged, and the fullest of
// them stays.
std::vector<ProfileMoment> Thin(const std::vector<ProfileMoment>& profile, size_t columns);

}  // namespace upipe::report
