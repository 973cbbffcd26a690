// The coordinator's Prometheus endpoint (docs/metrics.md): jobs and nodes by state, restarts,
// stalls, commits, how long decisions take, and of each running job how far it is and how far apart
// its ranks are.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "coordinator/core/state.h"

namespace upipe::coordinator {

class Metrics {
 public:
  // Serves /metrics on `listen` ("127.0.0.1:0"). Unavailable when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<Metrics>> Serve(const std::string& listen);
  ~Metrics();

  // host:port in use.
  const std::string& address() const { return address_; }

  // Called by the deciding thread, at most once a second.
  void Update(const State& state, BootTime now);
  // Deciding about `event` took this long. Called by the deciding thread.
  void ObserveStep(const Event& event, absl::Duration took);

 private:
  struct Families;
  Metrics();
  void UpdateTally(const Tally& tally);
  void UpdateJobs(const State& state);
  std::unique_ptr<Families> families_;
  std::string address_;
};

}  // namespace upipe::coordinator
