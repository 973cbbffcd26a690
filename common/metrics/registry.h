// What a daemon tells Prometheus. A family of series is declared once, by a descriptor: /metrics
// and the tables of docs/metrics.md are both made from these.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/check.h"

namespace upipe {

enum class MetricType { kGauge, kCounter, kHistogram };

struct MetricDescriptor {
  std::string name;
  std::string unit = {};                 // a base unit; empty for counts and states
  std::vector<std::string> labels = {};  // beside those that all series of the registry have
  std::string help;                      // without a full stop
  std::string absent = {};  // when there is no such series, "until .."; empty: from the start
  // Filled in by the registry.
  MetricType type = MetricType::kGauge;
  std::string section = {};
};

// Series of one name. Cheap to copy; lives as long as its registry. Thread-safe.
template <typename Metric>
class MetricFamily {
 public:
  // The series of these label values, one for each label of the descriptor in its order.
  Metric& At(const std::vector<std::string>& values = {}) const {
    UPIPE_CHECK(values.size() == labels_->size())
        << family_->GetName() << " has " << labels_->size() << " labels, not " << values.size();
    prometheus::Labels labels = *common_;
    for (size_t i = 0; i < values.size(); ++i) labels[(*labels_)[i]] = values[i];
    if constexpr (std::is_same_v<Metric, prometheus::Histogram>) {
      return family_->Add(labels, *bounds_);
    } else {
      return family_->Add(labels);
    }
  }
  void Remove(Metric& metric) const { family_->Remove(&metric); }
  friend bool operator==(const MetricFamily& a, const MetricFamily& b) {
    return a.family_ == b.family_;
  }

 private:
  friend class MetricsRegistry;
  prometheus::Family<Metric>* family_ = nullptr;
  std::shared_ptr<const prometheus::Labels> common_;
  std::shared_ptr<const std::vector<std::string>> labels_;
  std::shared_ptr<const std::vector<double>> bounds_;  // of histograms
};
using Gauges = MetricFamily<prometheus::Gauge>;
using Counters = MetricFamily<prometheus::Counter>;
using Histograms = MetricFamily<prometheus::Histogram>;

class MetricsRegistry {
 public:
  // `common` are labels of every series.
  explicit MetricsRegistry(prometheus::Labels common = {});

  // What is declared from here on stands under this title in the document.
  MetricsRegistry& Section(std::string title);
  Gauges Gauge(MetricDescriptor descriptor);
  Counters Counter(MetricDescriptor descriptor);
  // `bounds` of the buckets rise.
  Histograms Histogram(MetricDescriptor descriptor, std::vector<double> bounds);
  const std::vector<MetricDescriptor>& descriptors() const { return descriptors_; }

  // While the lock is held scrapes wait: they see all of what changes under it, or nothing.
  [[nodiscard]] std::unique_lock<std::mutex> Hold() { return std::unique_lock(*mutex_); }

  // Serves /metrics on `listen` ("127.0.0.1:0" = any free port); returns host:port. Unavailable
  // when it cannot be bound. Stopping to serve, at destruction, takes up to two seconds.
  absl::StatusOr<std::string> Serve(const std::string& listen);

 private:
  template <typename Metric, typename Builder>
  MetricFamily<Metric> Declare(Builder builder, MetricDescriptor descriptor, MetricType type);

  const std::shared_ptr<const prometheus::Labels> common_;
  const std::shared_ptr<std::mutex> mutex_ = std::make_shared<std::mutex>();
  const std::shared_ptr<prometheus::Registry> registry_ = std::make_shared<prometheus::Registry>();
  std::string section_;
  std::vector<MetricDescriptor> descriptors_;
  std::shared_ptr<prometheus::Collectable> held_;  // the registry behind the mutex
  std::unique_ptr<prometheus::Exposer> exposer_;
};

// Gauges that come and go together: those of one attempt, one job. Not thread-safe.
class GaugeGroup {
 public:
  void Set(const Gauges& family, std::vector<std::string> values, double value);
  // No series of the group is left.
  void Clear();

 private:
  struct Series {
    Gauges family;
    std::vector<std::string> values;
    prometheus::Gauge* gauge = nullptr;
  };
  std::vector<Series> series_;  // few: found by looking at each
};

// The tables of docs/metrics.md: one for each section in the order of declaration, `note` below its
// title.
std::string MetricTables(const std::vector<MetricDescriptor>& descriptors, const std::string& note);

}  // namespace upipe
