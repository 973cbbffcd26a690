#include "worker/runtime/metrics_endpoint.h"

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/registry.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace upipe::worker {
namespace {

using Labels = prometheus::Labels;
using GaugeFamily = prometheus::Family<prometheus::Gauge>;
using CounterFamily = prometheus::Family<prometheus::Counter>;

// A client that connects and says nothing holds one thread, for two seconds.
std::vector<std::string> HttpOptions(const std::string& listen) {
  return {"listening_ports", listen, "num_threads", "4", "request_timeout_ms", "2000"};
}

class PrometheusEndpoint : public MetricsEndpoint {
 public:
  PrometheusEndpoint(const std::string& listen, const Names& names)
      : names_(names),
        exposer_(HttpOptions(listen)),
        registry_(std::make_shared<prometheus::Registry>()) {
    for (const char* outcome : {"finished", "left", "killed", "failed", "not_started"})
      rank_exits_total_.Add(ExitLabels(outcome));
    exposer_.RegisterCollectable(registry_);
    address_ =
        absl::StrCat(listen.substr(0, listen.rfind(':')), ":", exposer_.GetListeningPorts().at(0));
  }

  const std::string& address() const override { return address_; }

  void BeginAttempt(const AttemptInfo& attempt) override {
    std::lock_guard lock(mutex_);
    Forget(attempt.slot);
    Slot& slot = slots_[attempt.slot];
    Labels labels = Base(attempt.slot);
    labels["job"] = attempt.job;
    labels["generation"] = absl::StrCat(attempt.generation);
    labels["rank"] = absl::StrCat(attempt.rank);
    Set(slot, info_, labels, 1);
    Set(slot, planned_bytes_, WithPool(Base(attempt.slot), "device"),
        static_cast<double>(attempt.planned_bytes));
    Set(slot, planned_bytes_, WithPool(Base(attempt.slot), "host"),
        static_cast<double>(attempt.planned_host_bytes));
  }

  void Observe(int index, const v1::StepReport& report) override {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    const Labels base = Base(index);
    SetMemory(slot, base, "device", report.memory());
    SetMemory(slot, base, "host", report.host_memory());
    Set(slot, attention_peak_bytes_, base,
        static_cast<double>(report.memory().attention_peak_bytes()));
    Set(slot, loss_, base, report.loss());
    Set(slot, tokens_per_second_, base, report.tokens_per_second());
    Set(slot, step_seconds_, base, report.step_seconds());
    Set(slot, own_step_seconds_, base,
        std::max(0.0, report.step_seconds() - report.comm_seconds()));
    Set(slot, grad_norm_, base, report.grad_norm());
    // Counters never go down while the worker lives, whoever holds the slot.
    steps_total_.Add(base).Increment();
    comm_seconds_total_.Add(base).Increment(report.comm_seconds());
  }

  void CountCheckpoint(int index, const v1::CheckpointRef& committed) override {
    std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    const Labels base = Base(index);
    checkpoints_total_.Add(base).Increment();
    Set(slot, checkpoint_step_, base, static_cast<double>(committed.step()));
    Set(slot, checkpoint_bytes_, base, static_cast<double>(committed.bytes()));
    Set(slot, checkpoint_seconds_, base, committed.write_seconds());
    Set(slot, checkpoint_timestamp_, base, static_cast<double>(absl::ToUnixSeconds(absl::Now())));
  }

  void CountProblem(int slot) override {
    std::lock_guard lock(mutex_);
    checkpoint_problems_total_.Add(Base(slot)).Increment();
  }

  void SetInPlace(int index, absl::Duration in_place) override {
    std::lock_guard lock(mutex_);
    Set(slots_[index], in_place_seconds_, Base(index), absl::ToDoubleSeconds(in_place));
  }

  void CountExit(const std::string& outcome) override {
    std::lock_guard lock(mutex_);
    rank_exits_total_.Add(ExitLabels(outcome)).Increment();
  }

  void EndAttempt(int slot) override {
    std::lock_guard lock(mutex_);
    Forget(slot);
  }

 private:
  struct Series {
    GaugeFamily* family;
    prometheus::Gauge* gauge;
  };
  struct Slot {
    std::vector<Series> series;
  };

  GaugeFamily& Gauge(const char* name, const char* help) {
    return prometheus::BuildGauge().Name(name).Help(help).Register(*registry_);
  }
  CounterFamily& Counter(const char* name, const char* help) {
    return prometheus::BuildCounter().Name(name).Help(help).Register(*registry_);
  }
  Labels Base(int slot) const {
    return {{"worker", names_.worker}, {"node", names_.node}, {"slot", absl::StrCat(slot)}};
  }
  Labels ExitLabels(const std::string& outcome) const {
    return {{"worker", names_.worker}, {"node", names_.node}, {"outcome", outcome}};
  }
  static Labels WithPool(Labels labels, const char* pool) {
    labels["pool"] = pool;
    return labels;
  }
  void SetMemory(Slot& slot, const Labels& base, const char* pool, const v1::MemoryUsage& usage) {
    for (const v1::TagBytes& tag : usage.tags()) {
      Labels labels = WithPool(base, pool);
      labels["tag"] = tag.tag();
      Set(slot, memory_bytes_, labels, static_cast<double>(tag.bytes()));
      Set(slot, tag_peak_bytes_, labels, static_cast<double>(tag.peak_bytes()));
    }
    Set(slot, memory_peak_bytes_, WithPool(base, pool), static_cast<double>(usage.peak_bytes()));
  }
  void Set(Slot& slot, GaugeFamily& family, const Labels& labels, double value) {
    prometheus::Gauge& gauge = family.Add(labels);
    gauge.Set(value);
    for (const Series& known : slot.series) {
      if (known.gauge == &gauge) return;
    }
    slot.series.push_back({&family, &gauge});
  }
  void Forget(int index) {
    for (const Series& series : slots_[index].series) series.family->Remove(series.gauge);
    slots_[index].series.clear();
  }

  const Names names_;
  prometheus::Exposer exposer_;
  std::shared_ptr<prometheus::Registry> registry_;
  std::string address_;
  std::mutex mutex_;
  std::map<int, Slot> slots_;
  GaugeFamily& info_ = Gauge("upipe_attempt_info", "1 for the attempt that holds the slot.");
  GaugeFamily& memory_bytes_ =
      Gauge("upipe_memory_bytes", "Bytes allocated between steps, by pool and tag.");
  GaugeFamily& tag_peak_bytes_ =
      Gauge("upipe_memory_tag_peak_bytes", "Each tag's own peak, also inside steps.");
  GaugeFamily& attention_peak_bytes_ =
      Gauge("upipe_attention_peak_bytes", "Joint peak of the attn_* tags.");
  GaugeFamily& memory_peak_bytes_ =
      Gauge("upipe_memory_peak_bytes", "Live peak of a pool over all tags.");
  GaugeFamily& planned_bytes_ =
      Gauge("upipe_memory_planned_bytes", "The plan's peak of this rank, by pool.");
  GaugeFamily& loss_ = Gauge("upipe_loss", "Loss of the last step, nats per token, all ranks.");
  GaugeFamily& tokens_per_second_ =
      Gauge("upipe_tokens_per_second", "Of the last step, all ranks.");
  GaugeFamily& step_seconds_ = Gauge("upipe_step_seconds", "Duration of the last step.");
  GaugeFamily& grad_norm_ = Gauge("upipe_grad_norm", "Global gradient norm before clipping.");
  GaugeFamily& own_step_seconds_ =
      Gauge("upipe_step_own_seconds",
            "Of the last step, outside collectives: the rank with the most is the straggler.");
  GaugeFamily& in_place_seconds_ =
      Gauge("upipe_rank_in_place_seconds", "Since the rank's position last changed.");
  GaugeFamily& checkpoint_step_ =
      Gauge("upipe_checkpoint_step", "Step of the last checkpoint committed; by rank 0.");
  GaugeFamily& checkpoint_bytes_ =
      Gauge("upipe_checkpoint_bytes", "Of the last checkpoint committed, all ranks.");
  GaugeFamily& checkpoint_seconds_ =
      Gauge("upipe_checkpoint_seconds", "From the step boundary to the last manifest.");
  GaugeFamily& checkpoint_timestamp_ =
      Gauge("upipe_checkpoint_timestamp_seconds", "When the last manifest was committed.");
  CounterFamily& checkpoints_total_ =
      Counter("upipe_checkpoints_total", "Manifests committed by ranks of this slot.");
  CounterFamily& checkpoint_problems_total_ = Counter(
      "upipe_checkpoint_problems_total", "Checkpoints not made, or passed over at a start.");
  CounterFamily& rank_exits_total_ = Counter("upipe_rank_exits_total", "Ended ranks, by outcome.");
  CounterFamily& steps_total_ = Counter("upipe_steps_total", "Step reports received.");
  CounterFamily& comm_seconds_total_ = Counter(
      "upipe_comm_seconds_total", "Seconds inside collectives, waiting for peers included.");
};

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& listen,
                                                                        const Names& names) {
  try {
    return std::make_unique<PrometheusEndpoint>(listen, names);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", listen, ": ",
                                               error.what(), "; use --metrics-listen HOST:PORT"));
  }
}

}  // namespace upipe::worker
