#include "coordinator/runtime/metrics.h"

#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <map>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace upipe::coordinator {

struct Metrics::Families {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  prometheus::Family<prometheus::Gauge>& jobs =
      prometheus::BuildGauge().Name("upipe_jobs").Help("Jobs by state").Register(*registry);
  prometheus::Family<prometheus::Gauge>& nodes = prometheus::BuildGauge()
                                                     .Name("upipe_nodes")
                                                     .Help("Worker nodes by state")
                                                     .Register(*registry);
  prometheus::Gauge& queue = prometheus::BuildGauge()
                                 .Name("upipe_queue_length")
                                 .Help("Jobs waiting for a plan or for slots")
                                 .Register(*registry)
                                 .Add({});
  prometheus::Gauge& revision = prometheus::BuildGauge()
                                    .Name("upipe_store_revision")
                                    .Help("Store revision decided last")
                                    .Register(*registry)
                                    .Add({});
  prometheus::Gauge& epoch = prometheus::BuildGauge()
                                 .Name("upipe_coordinator_epoch")
                                 .Help("Grows at every start of the coordinator")
                                 .Register(*registry)
                                 .Add({});
  std::unique_ptr<prometheus::Exposer> exposer;
};

namespace {

std::string Label(absl::string_view name, absl::string_view prefix) {
  name.remove_prefix(prefix.size());
  return absl::AsciiStrToLower(name);
}

}  // namespace

Metrics::Metrics() : families_(std::make_unique<Families>()) {}
Metrics::~Metrics() = default;

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Serve(const std::string& listen) {
  std::unique_ptr<Metrics> metrics(new Metrics());
  try {
    metrics->families_->exposer = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", listen, "num_threads", "4", "request_timeout_ms", "2000"});
    const std::vector<int> ports = metrics->families_->exposer->GetListeningPorts();
    const std::string host = listen.substr(0, listen.rfind(':'));
    metrics->address_ = absl::StrCat(host, ":", ports.empty() ? 0 : ports.front());
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", listen, ": ", e.what()));
  }
  metrics->families_->exposer->RegisterCollectable(metrics->families_->registry);
  return metrics;
}

void Metrics::Update(const State& state, BootTime now) {
  std::map<v1::JobState, int> jobs;
  for (const auto& [id, job] : state.jobs) ++jobs[job.record.state()];
  for (int s = v1::JOB_STATE_PLANNING; s <= v1::JOB_STATE_CANCELLED; ++s) {
    const auto job_state = static_cast<v1::JobState>(s);
    families_->jobs.Add({{"state", Label(v1::JobState_Name(job_state), "JOB_STATE_")}})
        .Set(jobs[job_state]);
  }
  std::map<v1::NodeState, int> nodes;
  for (const auto& [worker, node] : state.nodes) ++nodes[StateOf(state, node, now)];
  for (int s = v1::NODE_STATE_READY; s <= v1::NODE_STATE_UNKNOWN; ++s) {
    const auto node_state = static_cast<v1::NodeState>(s);
    families_->nodes.Add({{"state", Label(v1::NodeState_Name(node_state), "NODE_STATE_")}})
        .Set(nodes[node_state]);
  }
  families_->queue.Set(static_cast<double>(state.queue.size()));
  families_->revision.Set(static_cast<double>(state.revision));
  families_->epoch.Set(static_cast<double>(state.epoch));
}

}  // namespace upipe::coordinator
