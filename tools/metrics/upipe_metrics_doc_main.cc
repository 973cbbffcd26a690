// upipe-metrics-doc: puts the tables of every Prometheus series between two marks of
// docs/metrics.md, from the descriptors that the daemons serve; with --check it only compares.
#include <CLI/CLI.hpp>
#include <fstream>
#include <iostream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/parse_arguments.h"
#include "coordinator/runtime/series.h"
#include "worker/runtime/series.h"

namespace upipe {
namespace {

constexpr const char* kBegin = "<!-- series: written by upipe-metrics-doc -->\n";
constexpr const char* kEnd = "<!-- end of series -->\n";

std::string Tables() {
  MetricsRegistry of_coordinator, of_worker;
  const coordinator::CoordinatorSeries coordinator_series{of_coordinator};
  const worker::WorkerSeries worker_series{of_worker};
  return absl::StrCat(
      MetricTables(of_worker.descriptors(), "Beside those named, labels `worker` and `node`."),
      MetricTables(of_coordinator.descriptors(), ""), "\n");
}

int Run(const std::string& path, bool check) {
  std::stringstream read;
  read << std::ifstream(path).rdbuf();
  const std::string text = read.str();
  const size_t begin = text.find(kBegin);
  const size_t end = text.find(kEnd);
  if (begin == std::string::npos || end == std::string::npos || end < begin) {
    std::cerr << path << " lacks the line " << kBegin << "or, after it, " << kEnd;
    return 2;
  }
  const std::string wanted =
      absl::StrCat(text.substr(0, begin), kBegin, Tables(), text.substr(end));
  if (wanted == text) return 0;
  if (check) {
    std::cerr << path << " is not what the descriptors say; run `upipe-metrics-doc " << path
              << "`\n";
    return 1;
  }
  std::ofstream(path) << wanted;
  return 0;
}

}  // namespace
}  // namespace upipe

int main(int argc, char** argv) {
  CLI::App app("Writes what the daemons tell Prometheus into docs/metrics.md.");
  std::string path;
  bool check = false;
  app.add_option("document", path)->required()->check(CLI::ExistingFile);
  app.add_flag("--check", check, "compare only; exit code 1 when it differs");
  if (const std::optional<int> over = upipe::ParseArguments(app, argc, argv)) return *over;
  return upipe::Run(path, check);
}
