#include "coordinator/runtime/metrics.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "coordinator/runtime/straggler.h"

namespace upipe::coordinator {

namespace {

using GaugeFamily = prometheus::Family<prometheus::Gauge>;
using CounterFamily = prometheus::Family<prometheus::Counter>;

GaugeFamily& Gauge(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(registry);
}
CounterFamily& Counter(prometheus::Registry& registry, const char* name, const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
}

// Label of each kind of event, as Event lists them.
constexpr std::array<const char*, std::variant_size_v<Event>> kEventNames = {
    "submit",      "cancel",     "hold",        "release", "cordon", "uncordon",
    "drain",       "fence_node", "forget_node", "plan",    "hello",  "heartbeat",
    "rank_report", "progress",   "session_end", "tick"};

// By event.
std::vector<prometheus::Histogram*> StepHistograms(prometheus::Registry& registry) {
  auto& family = prometheus::BuildHistogram()
                     .Name("upipe_coordinator_step_seconds")
                     .Help("Time to decide about one event, the scheduler's pass included")
                     .Register(registry);
  const prometheus::Histogram::BucketBoundaries bounds = {1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3,
                                                          0.01, 0.03, 0.1,  0.3,  1,    3};
  std::vector<prometheus::Histogram*> histograms;
  for (const char* name : kEventNames) {
    histograms.push_back(&family.Add({{"event", name}}, bounds));
  }
  return histograms;
}

// A counter that follows a count kept elsewhere.
void RaiseTo(prometheus::Counter& counter, int64_t count) {
  counter.Increment(static_cast<double>(count) - counter.Value());
}

}  // namespace

struct Metrics::Families {
  std::shared_ptr<prometheus::Registry> registry = std::make_shared<prometheus::Registry>();
  GaugeFamily& jobs = Gauge(*registry, "upipe_jobs", "Jobs by state");
  GaugeFamily& nodes = Gauge(*registry, "upipe_nodes", "Worker nodes by state");
  prometheus::Gauge& cordoned =
      Gauge(*registry, "upipe_nodes_cordoned", "Workers that take no new ranks").Add({});
  CounterFamily& restarts =
      Counter(*registry, "upipe_restarts_total",
              "Attempts that ended in a restart, by cause and by the budget they were charged to");
  prometheus::Counter& stalls =
      Counter(*registry, "upipe_stalls_total", "Attempts in which no rank moved in time").Add({});
  prometheus::Counter& commits =
      Counter(*registry, "upipe_checkpoints_committed_total", "Checkpoints committed").Add({});
  prometheus::Counter& problems =
      Counter(*registry, "upipe_checkpoint_problems_total",
              "Checkpoints that were not made, or were passed over at a start")
          .Add({});
  GaugeFamily& step =
      Gauge(*registry, "upipe_job_step", "Last step of a running job, as rank 0 reported it");
  GaugeFamily& checkpoint_step = Gauge(*registry, "upipe_job_checkpoint_step",
                                       "Step of a running job's newest committed checkpoint");
  GaugeFamily& own_median =
      Gauge(*registry, "upipe_job_own_seconds_median",
            "Seconds of the last step outside collectives, median over a running job's ranks");
  GaugeFamily& own_max =
      Gauge(*registry, "upipe_job_own_seconds_max", "The same of its slowest rank");
  GaugeFamily& slowest =
      Gauge(*registry, "upipe_job_slowest_rank", "The rank upipe_job_own_seconds_max is of");
  struct JobGauges {
    std::vector<std::pair<GaugeFamily*, prometheus::Gauge*>> gauges;
  };
  std::map<std::string, JobGauges> of_job;
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
  std::vector<prometheus::Histogram*> steps = StepHistograms(*registry);
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
  int cordoned = 0;
  for (const auto& [worker, node] : state.nodes) cordoned += node.record.cordoned() ? 1 : 0;
  families_->cordoned.Set(cordoned);
  UpdateTally(state.tally);
  UpdateJobs(state);
  families_->queue.Set(static_cast<double>(state.queue.size()));
  families_->revision.Set(static_cast<double>(state.revision));
  families_->epoch.Set(static_cast<double>(state.epoch));
}

void Metrics::ObserveStep(const Event& event, absl::Duration took) {
  families_->steps[event.index()]->Observe(absl::ToDoubleSeconds(took));
}

void Metrics::UpdateTally(const Tally& tally) {
  for (const auto& [key, count] : tally.restarts) {
    const auto& [cause, budget] = key;
    RaiseTo(families_->restarts.Add(
                {{"cause", Label(v1::CauseKind_Name(cause), "CAUSE_KIND_")}, {"budget", budget}}),
            count);
  }
  RaiseTo(families_->stalls, tally.stalls);
  RaiseTo(families_->commits, tally.commits);
  RaiseTo(families_->problems, tally.checkpoint_problems);
}

void Metrics::UpdateJobs(const State& state) {
  std::map<std::string, Families::JobGauges> seen;
  for (const std::string& id : state.active) {
    const Job& job = state.jobs.at(id);
    if (job.record.state() != v1::JOB_STATE_RUNNING) continue;
    Families::JobGauges& known = seen[id];
    const auto set = [&](GaugeFamily& family, double value) {
      prometheus::Gauge& gauge = family.Add({{"job", id}});
      gauge.Set(value);
      known.gauges.emplace_back(&family, &gauge);
    };
    set(families_->step, static_cast<double>(job.attempt->record.ranks(0).last_report().step()));
    if (job.record.has_last_commit()) {
      set(families_->checkpoint_step, static_cast<double>(job.record.last_commit().step()));
    }
    if (const std::optional<OwnTimes> times = OwnTimesOf(job)) {
      set(families_->own_median, times->median_seconds);
      set(families_->own_max, times->max_seconds);
      set(families_->slowest, times->slowest_rank);
    }
  }
  for (const auto& [id, known] : families_->of_job) {
    for (const auto& [family, gauge] : known.gauges) {
      const auto still = seen.find(id);
      const bool kept = still != seen.end() &&
                        std::any_of(still->second.gauges.begin(), still->second.gauges.end(),
                                    [&](const auto& entry) { return entry.second == gauge; });
      if (!kept) family->Remove(gauge);
    }
  }
  families_->of_job = std::move(seen);
}

}  // namespace upipe::coordinator
