// Before step 1: what the libraries behind a device's ops really take, against what the plan
// counted.
#pragma once

#include "absl/status/status.h"
#include "kernels/api/device.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

struct WorkspaceCheck {
  // ResourceExhausted naming op, bytes and planned bytes where some op of the rank's step takes
  // more than the plan counted; FailedPrecondition where a library cannot do one.
  absl::Status status;
  // With ResourceExhausted: every op of every rank's step as it is on this device. What another
  // plan needs to hold.
  v1::MeasuredWorkspaces measured;
};

// Has `device` ready every op of this rank's step (OpTable::Prepare), by a dry run of the step: no
// memory is touched, nothing is sent. Seconds on cuda, where libraries compile their kernels now
// and not in step 1; milliseconds elsewhere. Where something takes too much, the steps of all
// ranks.
WorkspaceCheck CheckWorkspaces(const v1::RunPlan& plan, int rank, kernels::Device& device);

}  // namespace upipe::train
