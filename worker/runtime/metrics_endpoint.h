// The worker's Prometheus endpoint: one set of series per slot, for the attempt that holds it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "upipe/v1/plan.pb.h"
#include "upipe/v1/report.pb.h"

namespace upipe::worker {

struct AttemptInfo {
  int slot = 0;
  std::string job;
  int64_t generation = 0;
  int rank = 0;
  int64_t planned_bytes = 0;       // the plan's peak of this rank's device memory
  int64_t planned_host_bytes = 0;  // and of its host memory
};

// Thread-safe.
class MetricsEndpoint {
 public:
  struct Names {
    std::string worker;
    std::string node;
  };
  // Serves /metrics on `listen` ("127.0.0.1:0" = any free port).
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(const std::string& listen,
                                                                const Names& names);
  virtual ~MetricsEndpoint() = default;

  // "127.0.0.1:40123".
  virtual const std::string& address() const = 0;
  // The slot's earlier series go before the new ones appear.
  virtual void BeginAttempt(const AttemptInfo& attempt) = 0;
  virtual void Observe(int slot, const v1::StepReport& report) = 0;
  // By rank 0.
  virtual void CountCheckpoint(int slot, const v1::CheckpointRef& committed) = 0;
  virtual void CountProblem(int slot) = 0;
  // Since the rank last moved.
  virtual void SetInPlace(int slot, absl::Duration in_place) = 0;
  // `outcome`: finished, left, killed, failed or not_started.
  virtual void CountExit(const std::string& outcome) = 0;
  virtual void EndAttempt(int slot) = 0;
};

}  // namespace upipe::worker
