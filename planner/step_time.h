// How long a step takes on a device nobody has here: counts of a dry run (step_counts.h) by the
// rates of a device description. Nothing is fitted: a rate is what its source says it is, and what
// runs beside computation is hidden as far as it fits (docs/planning-throughput.md).
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "planner/step_counts.h"
#include "upipe/v1/device.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// What a step's time depends on beside its counts.
struct StepShape {
  int ranks = 1;
  double tokens = 0;          // of all sequences of a step
  double model_flops = 0;     // of all ranks, without recomputation
  int64_t turns = 1;          // stages x query chunks of an attention layer
  bool own_backward = false;  // attention's backward is our own kernel, whatever the device's is
  // `plan` needs spec (with defaults), schedule and model_flops.
  static StepShape From(const v1::RunPlan& plan);
};

// Of one rank, all others waiting for it. InvalidArgument naming the rate that the counts need and
// the device description lacks.
//
// Computation: a product takes its FLOPs at the rate for its rows, attention those at the rate for
// the keys it attends over, neither less than its operands take to cross memory; everything else
// takes that. No op takes less than its launch. Ops on host memory go as fast as AdamW does there.
// Collectives take their latency and the longer of what they send inside and outside the node.
// Those beside the compute stream hide: a stage's exchanges behind the attention of the pass, all
// but one turn's in `turns`; weights behind the computation that is left. So do copies to and from
// host memory, which run both ways at once, behind the computation of their pass.
absl::StatusOr<v1::StepTime> TimeStep(const StepCounts& counts, const StepShape& shape,
                                      const v1::DeviceFile& device);

}  // namespace upipe::planner
