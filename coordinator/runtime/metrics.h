// The coordinator's Prometheus endpoint: what series.h declares, filled from the state, from what
// the threads observe, and from what has changed since the last look.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "coordinator/core/state.h"
#include "coordinator/runtime/series.h"

namespace upipe::coordinator {

class Metrics {
 public:
  struct Options {
    std::string listen = "127.0.0.1:0";
    std::string version = {};
  };
  // Serves /metrics. Unavailable when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<Metrics>> Serve(const Options& options);

  // host:port in use.
  const std::string& address() const { return address_; }

  // Called by the deciding thread, at most once a second. Looks at jobs that wait or run and at
  // workers, not at jobs that have ended.
  void Update(const State& state, Moment now);
  // Deciding about `event` took this long. Called by the deciding thread.
  void ObserveStep(const Event& event, absl::Duration took);
  // A durable write took this long. Thread-safe.
  void ObserveCommit(absl::Duration took);
  // A call of `method`, "/upipe.v1.JobService/Submit", ended. Thread-safe.
  void ObserveCall(const std::string& method, absl::StatusCode code, absl::Duration took);

 private:
  static constexpr int kNumCodes = 17;
  struct Calls {
    std::array<prometheus::Counter*, kNumCodes> ended = {};  // by code
    prometheus::Histogram* seconds = nullptr;
  };
  struct JobGauges {
    int64_t generation = 0;
    GaugeGroup gauges;
  };
  explicit Metrics(const std::string& version);
  Calls CallsOf(const std::string& label) const;
  void UpdateCluster(const State& state, Moment now);
  void UpdateQueue(const State& state, BootTime now);
  void UpdateTally(const Tally& tally);
  void UpdateJobs(const State& state);
  void SetJob(const std::string& id, const Job& job, GaugeGroup& gauges);

  MetricsRegistry registry_;
  const CoordinatorSeries series_{registry_};
  std::string address_;
  std::vector<prometheus::Histogram*> decisions_;  // by event
  absl::flat_hash_map<std::string, Calls> calls_;  // by method; never changed after the start
  Calls other_calls_;
  std::map<std::string, JobGauges> jobs_;  // running ones
  std::map<std::string, GaugeGroup> workers_;
  WaitCounts queue_waits_, restart_waits_;  // as of the last look
};

}  // namespace upipe::coordinator
