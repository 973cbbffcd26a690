#include "benchmarks/support/bench_report.h"

#include <algorithm>
#include <ctime>
#include <fstream>
#include <iostream>
#include <thread>

#include "common/machine.h"

namespace upipe::bench {
namespace {

std::string UtcNow() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

}  // namespace

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return (values[(values.size() - 1) / 2] + values[values.size() / 2]) / 2;
}

nlohmann::ordered_json Spread(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {{"median", Median(values)}, {"min", *least}, {"max", *most}, {"samples", values.size()}};
}

nlohmann::ordered_json ReportHead(const std::string& commit, int argc, char** argv) {
  std::string command;
  for (int i = 0; i < argc; ++i) command += (i > 0 ? " " : "") + std::string(argv[i]);
  return {{"machine", CpuModel()},
          {"processors", std::thread::hardware_concurrency()},
          {"commit", commit},
          {"command", command},
          {"date", UtcNow()}};
}

bool WriteReport(const nlohmann::ordered_json& report, const std::string& path) {
  const std::string text = report.dump(2) + "\n";
  if (path.empty()) {
    std::cout << text;
    return true;
  }
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) std::cerr << "cannot write " << path << "\n";
  return !file.fail();
}

}  // namespace upipe::bench
