// The worker's Prometheus endpoint: what its slots hold and do, the gauges of each for the attempt
// that holds it.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "upipe/v1/report.pb.h"
#include "upipe/v1/worker_service.pb.h"
#include "worker/agent/reporting.h"
#include "worker/runtime/layer_progress.h"
#include "worker/runtime/series.h"

namespace upipe::worker {

// Thread-safe.
class MetricsEndpoint {
 public:
  struct Identity {
    std::string worker;
    std::string node;
    int num_slots = 0;
    std::string version;
    std::string backend;
    std::string isa;
  };
  // Serves /metrics on `listen` ("127.0.0.1:0" = any free port).
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(const std::string& listen,
                                                                const Identity& identity);

  // "127.0.0.1:40123".
  const std::string& address() const { return address_; }
  // The slot's earlier gauges are gone before the new ones appear; no scrape sees the time between.
  void BeginAttempt(const v1::StartRank& start);
  // Nothing but counters is left of the slot.
  void EndAttempt(int slot);
  void Observe(int slot, const v1::StepReport& report);
  // Where the slot's rank is, and for how long.
  void SetPosition(int slot, const v1::RankPosition& position, absl::Duration in_place);
  // By rank 0.
  void CountCheckpoint(int slot, const v1::CheckpointRef& committed);
  void CountProblem(int slot);
  void CountExit(RankOutcome outcome);
  void SetWorker(bool connected, const SlotCounts& slots);

 private:
  struct Slot {
    GaugeGroup gauges;
    LayerProgress layers;
    double flops_per_rank = 0;  // of a step, as MFU counts them
    double peak_flops = 0;      // 0: not known
  };
  explicit MetricsEndpoint(const Identity& identity);
  void InitialiseCounters(int num_slots);
  void SetPlannedMemory(Slot& slot, const std::string& name, const v1::StartRank& start);
  void SetMemory(Slot& slot, const std::string& name, const char* pool,
                 const v1::MemoryUsage& usage);
  void SetStep(Slot& slot, const std::string& name, const v1::StepReport& report);
  void CountStep(const std::string& name, const v1::StepReport& report);

  MetricsRegistry registry_;
  const WorkerSeries series_{registry_};
  std::map<int, Slot> slots_;
  std::string address_;
};

}  // namespace upipe::worker
