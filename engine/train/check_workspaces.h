// Before step 1: what the libraries behind a device's ops really take, against what the plan
// counted.
#pragma once

#include "absl/status/status.h"
#include "kernels/api/device.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// Has `device` ready every op of this rank's step (OpTable::Prepare), by a dry run of the step: no
// memory is touched, nothing is sent. The first error: ResourceExhausted naming an op, what it
// takes and what was planned, when the plan counted on another version of a library. Seconds on
// cuda, where libraries compile their kernels now and not in step 1; milliseconds elsewhere.
absl::Status CheckWorkspaces(const v1::RunPlan& plan, int rank, kernels::Device& device);

}  // namespace upipe::train
