// The timing rules of the control plane (CONTROL-PLANE, Timing). One value per coordinator, handed
// to every worker at hello; workers and coordinator apply them to their own boot-time clocks only.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

struct Timing {
  absl::Duration heartbeat = absl::Seconds(2);         // H, 10 ms to 1 h
  absl::Duration kill_bound = absl::Seconds(10);       // K, > 0
  absl::Duration autonomy = absl::Seconds(300);        // A, more than 3 H
  absl::Duration margin = absl::Seconds(10);           // M, > 0
  absl::Duration start_deadline = absl::Seconds(120);  // > 0

  // After this much silence of a worker its ranks are presumed gone: the worker killed them before.
  absl::Duration Expiry() const { return 1.01 * autonomy + kill_bound + margin; }
  // Silence after which nothing new is placed on a worker.
  absl::Duration SuspectAfter() const { return 3 * heartbeat; }

  // InvalidArgument naming every range that is broken.
  absl::Status Validate() const;
  v1::Timing ToProto() const;
};

}  // namespace upipe::coordinator
