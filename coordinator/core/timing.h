// The timing rules of the control plane (CONTROL-PLANE, Timing). One value per coordinator, handed
// to every worker at hello; workers and coordinator apply them to their own boot-time clocks only.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "upipe/v1/plan.pb.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

struct Timing {
  absl::Duration heartbeat = absl::Seconds(2);         // H, 10 ms to 1 h
  absl::Duration kill_bound = absl::Seconds(10);       // K, > 0
  absl::Duration autonomy = absl::Seconds(300);        // A, more than 3 H
  absl::Duration margin = absl::Seconds(10);           // M, > 0
  absl::Duration start_deadline = absl::Seconds(120);  // > 0, beside what a restore takes
  // The coordinator's own; workers do not hear of them.
  absl::Duration backoff_first = absl::Seconds(1);    // > 0, after a restart that made progress
  absl::Duration backoff_longest = absl::Minutes(5);  // doubling ends here; at least backoff_first
  absl::Duration stall_floor = absl::Seconds(30);     // > 0, the shortest stage deadline
  absl::Duration settle = absl::Seconds(10);       // > 0, workers heard of so lately are expected
  absl::Duration drain_grace = absl::Minutes(10);  // > 0, unless a drain names its own

  // After this much silence of a worker its ranks are presumed gone: the worker killed them before.
  absl::Duration Expiry() const { return 1.01 * autonomy + kill_bound + margin; }
  // Silence after which nothing new is placed on a worker.
  absl::Duration SuspectAfter() const { return 3 * heartbeat; }

  // The wait before a job is placed again after `fruitless` restarts in a row without progress.
  absl::Duration Backoff(int fruitless) const;

  // InvalidArgument naming every range that is broken.
  absl::Status Validate() const;
  v1::Timing ToProto() const;
};

// How long no rank of a running attempt may stay where it is: the stall floor, or ten times the
// longest piece of work between two positions (an attention stage, an MLP, the loss) at 1 GFLOP/s.
absl::Duration StageDeadline(const v1::RunPlan& plan, const Timing& timing);

// What reading or writing the checkpoint of all ranks may take on top, at 100 MB/s.
absl::Duration CheckpointAllowance(const v1::RunPlan& plan);

}  // namespace upipe::coordinator
