#include "common/metrics/registry.h"

#include <exception>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace upipe {
namespace {

// Collects while nothing is half changed.
class HeldRegistry : public prometheus::Collectable {
 public:
  HeldRegistry(std::shared_ptr<std::mutex> mutex, std::shared_ptr<prometheus::Registry> registry)
      : mutex_(std::move(mutex)), registry_(std::move(registry)) {}
  std::vector<prometheus::MetricFamily> Collect() const override {
    std::lock_guard lock(*mutex_);
    return registry_->Collect();
  }

 private:
  const std::shared_ptr<std::mutex> mutex_;
  const std::shared_ptr<prometheus::Registry> registry_;
};

const char* NameOf(MetricType type) {
  switch (type) {
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kCounter:
      return "counter";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

}  // namespace

MetricsRegistry::MetricsRegistry(prometheus::Labels common)
    : common_(std::make_shared<const prometheus::Labels>(std::move(common))) {}

MetricsRegistry& MetricsRegistry::Section(std::string title) {
  section_ = std::move(title);
  return *this;
}

template <typename Metric, typename Builder>
MetricFamily<Metric> MetricsRegistry::Declare(Builder builder, MetricDescriptor descriptor,
                                              MetricType type) {
  MetricFamily<Metric> family;
  family.family_ = &builder.Name(descriptor.name).Help(descriptor.help).Register(*registry_);
  family.common_ = common_;
  family.labels_ = std::make_shared<const std::vector<std::string>>(descriptor.labels);
  descriptor.type = type;
  descriptor.section = section_;
  descriptors_.push_back(std::move(descriptor));
  return family;
}

Gauges MetricsRegistry::Gauge(MetricDescriptor descriptor) {
  return Declare<prometheus::Gauge>(prometheus::BuildGauge(), std::move(descriptor),
                                    MetricType::kGauge);
}

Counters MetricsRegistry::Counter(MetricDescriptor descriptor) {
  return Declare<prometheus::Counter>(prometheus::BuildCounter(), std::move(descriptor),
                                      MetricType::kCounter);
}

Histograms MetricsRegistry::Histogram(MetricDescriptor descriptor, std::vector<double> bounds) {
  Histograms family = Declare<prometheus::Histogram>(prometheus::BuildHistogram(),
                                                     std::move(descriptor), MetricType::kHistogram);
  family.bounds_ = std::make_shared<const std::vector<double>>(std::move(bounds));
  return family;
}

absl::StatusOr<std::string> MetricsRegistry::Serve(const std::string& listen) {
  try {
    // A client that connects and says nothing holds one thread, for two seconds.
    exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", listen, "num_threads", "4", "request_timeout_ms", "2000"});
    held_ = std::make_shared<HeldRegistry>(mutex_, registry_);
    exposer_->RegisterCollectable(held_);
    return absl::StrCat(listen.substr(0, listen.rfind(':')), ":",
                        exposer_->GetListeningPorts().at(0));
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", listen, ": ",
                                               error.what(), "; use --metrics-listen HOST:PORT"));
  }
}

void GaugeGroup::Set(const Gauges& family, std::vector<std::string> values, double value) {
  for (const Series& known : series_) {
    if (known.family == family && known.values == values) return known.gauge->Set(value);
  }
  prometheus::Gauge& gauge = family.At(values);
  gauge.Set(value);
  series_.push_back({family, std::move(values), &gauge});
}

void GaugeGroup::Clear() {
  for (const Series& series : series_) series.family.Remove(*series.gauge);
  series_.clear();
}

std::string MetricTables(const std::vector<MetricDescriptor>& descriptors,
                         const std::string& note) {
  std::string text;
  std::string section;
  for (const MetricDescriptor& metric : descriptors) {
    if (metric.section != section) {
      section = metric.section;
      absl::StrAppend(&text, "\n### ", section, "\n\n", note, note.empty() ? "" : "\n\n",
                      "| series | type | unit | meaning |\n|---|---|---|---|\n");
    }
    const std::string labels =
        metric.labels.empty() ? "" : absl::StrCat("{", absl::StrJoin(metric.labels, ","), "}");
    const std::string absent =
        metric.absent.empty() ? "" : absl::StrCat(". Absent ", metric.absent);
    absl::StrAppend(&text, "| `", metric.name, labels, "` | ", NameOf(metric.type), " | ",
                    metric.unit, " | ", metric.help, absent, " |\n");
  }
  return text;
}

}  // namespace upipe
