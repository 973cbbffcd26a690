// What a Prometheus endpoint says, read as Prometheus would.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/metrics/registry.h"

namespace upipe::testing {

// The text behind http://`address`/metrics, without what the HTTP server says of itself.
std::string Scrape(const std::string& address);

// Value by series, `name{label="value",..}` with labels in the order of their names.
std::map<std::string, double> SeriesOf(const std::string& text);

// Those of `name`, whatever their labels.
std::map<std::string, double> SeriesOf(const std::string& text, const std::string& name);

// Names of the families that have series.
std::set<std::string> NamesOf(const std::string& text);

// Names of the descriptors whose series are there from the start.
std::set<std::string> NeverAbsent(const std::vector<MetricDescriptor>& descriptors);
std::set<std::string> NamesOf(const std::vector<MetricDescriptor>& descriptors);

// That `text` has series of every descriptor and of no other, and that descriptors name things as
// they should; also by `promtool check metrics`, where there is one.
void ExpectServedAndWellNamed(const std::string& text,
                              const std::vector<MetricDescriptor>& descriptors);

}  // namespace upipe::testing
