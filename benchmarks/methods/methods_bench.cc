// Every method on one job, side by side in one run: tokens per second, processor seconds, peak
// bytes, traffic and the work that was executed. Ranks are threads that share the machine's cores,
// so the processor seconds of all of them together are what methods are compared by; rounds go
// through all methods, every other round backwards. Then UPipe beside Ulysses and beside ring at a
// longer context, in ABBA order, with the interval of the ratio.
#include <algorithm>
#include <array>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_format.h"
#include "benchmarks/methods/contestant.h"
#include "benchmarks/methods/method_case.h"
#include "benchmarks/support/bench_report.h"
#include "benchmarks/support/paired_ratio.h"
#include "common/status.h"
#include "common/units.h"
#include "kernels/cpu/isa.h"

namespace upipe::bench {
namespace {

using nlohmann::ordered_json;
using Contestants = std::vector<std::unique_ptr<Contestant>>;

struct Options {
  std::vector<int64_t> contexts = {8192, 16384};
  std::vector<int> ranks = {4, 8};
  int repeats = 2;
  int64_t compared_context = 32768;
  int compared_ranks = 4;
  int pairs = 5;
  std::string dtype = "bf16";
  bool quick = false;
  std::string only;  // a method's name; empty: all
  std::string output;
  std::string commit = "unknown";

  MethodJob Job(int num_ranks, int64_t context) const {
    return {.ranks = num_ranks, .context = context, .bf16 = dtype == "bf16"};
  }
};

ordered_json ModelRow(const MethodJob& job) {
  return {{"hidden_size", job.hidden_size}, {"num_layers", job.num_layers},
          {"num_heads", job.num_heads},     {"num_kv_heads", job.num_kv_heads},
          {"head_dim", job.head_dim},       {"intermediate_size", job.intermediate_size},
          {"vocab_size", job.vocab_size}};
}

absl::StatusOr<Contestants> MakeContestants(const std::vector<std::string>& names,
                                            const MethodJob& job) {
  Contestants contestants;
  for (const std::string& name : names) {
    UPIPE_ASSIGN_OR_RETURN(contestants.emplace_back(), Contestant::Create(MethodNamed(name), job));
    std::cerr << absl::StrFormat("  %s, %d ranks, %s tokens: ready\n", name, job.ranks,
                                 FormatTokenCount(job.context));
  }
  UPIPE_RETURN_IF_ERROR(CheckLosses(contestants, job.bf16));
  return contestants;
}

absl::Status CheckMemory(const Contestants& contestants) {
  for (const auto& contestant : contestants) UPIPE_RETURN_IF_ERROR(contestant->CheckMemory());
  return absl::OkStatus();
}

void PrintRow(const ordered_json& row) {
  std::cerr << absl::StrFormat(
      "%-16s %d ranks %6s tokens: %7.3f s, %8.3f CPU s (%.3f to %.3f), %.3f CPU s/TFLOP, %.1f MiB "
      "device, %.1f host, %.1f sent\n",
      row["method"].get<std::string>(), row["ranks"].get<int>(),
      FormatTokenCount(row["context"].get<int64_t>()), row["step_seconds"]["median"].get<double>(),
      row["cpu_seconds"]["median"].get<double>(), row["cpu_seconds"]["min"].get<double>(),
      row["cpu_seconds"]["max"].get<double>(), row["cpu_seconds_per_tflop"].get<double>(),
      row["device_memory"]["peak_bytes"].get<double>() / (1 << 20),
      row["host_memory"]["peak_bytes"].get<double>() / (1 << 20),
      row["bytes_sent"].get<double>() / (1 << 20));
}

void PrintOps(const ordered_json& ops) {
  for (const ordered_json& op : ops) {
    const double seconds = op["cpu_seconds"].get<double>();
    std::cerr << absl::StrFormat("    %-22s %7d calls %9.4f CPU s %7.1f GFLOP/s %6.1f GB/s\n",
                                 op["op"].get<std::string>(), op.value("calls", 0), seconds,
                                 1e3 * op.value("tflop", 0.0) / seconds,
                                 op.value("gbytes", 0.0) / seconds);
  }
}

// All methods, or the one that is asked for, at one context on so many ranks.
absl::Status MeasureSideBySide(const Options& options, const MethodJob& job, ordered_json& rows) {
  std::vector<std::string> names;
  for (const MethodCase& method : AllMethods()) {
    if (options.only.empty() || options.only == method.name) names.push_back(method.name);
  }
  UPIPE_ASSIGN_OR_RETURN(const Contestants contestants, MakeContestants(names, job));
  for (int round = 0; round < options.repeats; ++round) {
    for (size_t i = 0; i < contestants.size(); ++i) {
      const size_t at = round % 2 == 0 ? i : contestants.size() - 1 - i;
      UPIPE_RETURN_IF_ERROR(contestants[at]->Step());
    }
  }
  UPIPE_RETURN_IF_ERROR(CheckMemory(contestants));
  for (const auto& contestant : contestants) {
    UPIPE_ASSIGN_OR_RETURN(ordered_json row, contestant->Row());
    PrintRow(row);
    if (!options.only.empty()) PrintOps(row["ops"]);
    rows.push_back(std::move(row));
  }
  return absl::OkStatus();
}

absl::StatusOr<double> CpuSecondsOfStep(Contestant& contestant) {
  UPIPE_RETURN_IF_ERROR(contestant.Step());
  return contestant.steps().back().cpu_seconds;
}

ordered_json ComparisonRow(const Contestant& ours, const Contestant& other,
                           const std::vector<Abba>& pairs) {
  std::vector<double> ratios, our_seconds, other_seconds;
  ordered_json costs = ordered_json::array();
  for (const Abba& pair : pairs) {
    ratios.push_back(pair.ratio());
    our_seconds.insert(our_seconds.end(), {pair.cost[0], pair.cost[3]});
    other_seconds.insert(other_seconds.end(), {pair.cost[1], pair.cost[2]});
    costs.push_back(pair.cost);
  }
  const RatioEstimate estimate = EstimateRatio(ratios);
  ordered_json row = {{"method", ours.method().name},
                      {"other", other.method().name},
                      {"ranks", ours.plan().ranks_size()},
                      {"context", ours.plan().spec().train().context()},
                      {"cpu_seconds", Spread(our_seconds)},
                      {"other_cpu_seconds", Spread(other_seconds)},
                      {"ratio", estimate.ratio}};
  std::string doubt = "one pair";
  if (estimate.interval) {
    row["interval_95"] = {estimate.interval->low, estimate.interval->high};
    doubt = absl::StrFormat("%.4f to %.4f at 95 %%, %d pairs", estimate.interval->low,
                            estimate.interval->high, static_cast<int>(pairs.size()));
  }
  row["ratios"] = ratios;
  row["abba_cpu_seconds"] = costs;
  std::cerr << absl::StrFormat("%s beside %s: ratio of CPU seconds %.4f (%s)\n", ours.method().name,
                               other.method().name, estimate.ratio, doubt);
  return row;
}

// UPipe, Ulysses, Ulysses, UPipe, ring, ring, UPipe, Ulysses, ..: the step between two pairs
// belongs to both, and pairs of one comparison share none.
absl::Status Compare(const Options& options, ordered_json& report) {
  // So many heads that a rank of four works on three: three stages, at a cost that lets five pairs
  // of each fit into minutes.
  MethodJob job = options.Job(options.compared_ranks, options.compared_context);
  job.num_heads = 12;
  job.num_kv_heads = 4;
  report["compared_model"] = ModelRow(job);
  UPIPE_ASSIGN_OR_RETURN(const Contestants contestants,
                         MakeContestants({"upipe", "ulysses", "ring"}, job));
  Contestant& ours = *contestants[0];
  std::array<std::vector<Abba>, 2> pairs;  // of each of the others
  UPIPE_ASSIGN_OR_RETURN(double before, CpuSecondsOfStep(ours));
  for (int round = 0; round < options.pairs; ++round) {
    for (size_t i = 0; i < pairs.size(); ++i) {
      Contestant& other = *contestants[1 + i];
      Abba pair;
      pair.cost[0] = before;
      UPIPE_ASSIGN_OR_RETURN(pair.cost[1], CpuSecondsOfStep(other));
      UPIPE_ASSIGN_OR_RETURN(pair.cost[2], CpuSecondsOfStep(other));
      UPIPE_ASSIGN_OR_RETURN(pair.cost[3], CpuSecondsOfStep(ours));
      before = pair.cost[3];
      pairs[i].push_back(pair);
      std::cerr << absl::StrFormat("  pair %d with %s: %.4f\n", round + 1, other.method().name,
                                   pair.ratio());
    }
  }
  UPIPE_RETURN_IF_ERROR(CheckMemory(contestants));
  report["comparisons"] = ordered_json::array();
  for (size_t i = 0; i < pairs.size(); ++i) {
    report["comparisons"].push_back(ComparisonRow(ours, *contestants[1 + i], pairs[i]));
  }
  report["compared_rows"] = ordered_json::array();
  for (const auto& contestant : contestants) {
    UPIPE_ASSIGN_OR_RETURN(ordered_json row, contestant->Row());
    PrintRow(row);
    report["compared_rows"].push_back(std::move(row));
  }
  return absl::OkStatus();
}

absl::Status Measure(const Options& options, ordered_json& report) {
  report["isa"] = kernels::DispatchedIsa();
  report["matmul_core"] = kernels::MatmulCore();
  report["dtype"] = options.dtype;
  report["model"] = ModelRow({});
  report["rows"] = ordered_json::array();
  for (const int64_t context : options.contexts) {
    for (const int ranks : options.ranks) {
      UPIPE_RETURN_IF_ERROR(
          MeasureSideBySide(options, options.Job(ranks, context), report["rows"]));
    }
  }
  return options.only.empty() ? Compare(options, report) : absl::OkStatus();
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Every context-parallel method on one job: speed, processor seconds and memory");
  app.add_flag("--quick", options.quick,
               "1,024 tokens, one repeat, one pair: tells that it runs, not how fast");
  std::vector<std::string> names;
  for (const MethodCase& method : AllMethods()) names.push_back(method.name);
  CLI::Option* only =
      app.add_option("--only", options.only, "One method, op by op, for a profiler; no pairs")
          ->check(CLI::IsMember(names));
  app.add_option("--output", options.output, "JSON file; standard output when absent")
      ->excludes(only);
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--contexts", options.contexts, "Sequence lengths of all methods")
      ->check(CLI::PositiveNumber);
  app.add_option("--ranks", options.ranks, "Ranks of all methods, even numbers")
      ->check(CLI::Range(4, 16));
  app.add_option("--repeats", options.repeats, "Kept steps of each method")
      ->check(CLI::Range(1, 100));
  app.add_option("--compared-context", options.compared_context, "Sequence length of the pairs")
      ->check(CLI::PositiveNumber);
  app.add_option("--compared-ranks", options.compared_ranks, "Ranks of the pairs")
      ->check(CLI::Range(2, 16));
  app.add_option("--pairs", options.pairs, "ABBA pairs with Ulysses, and with ring")
      ->check(CLI::Range(1, 100));
  app.add_option("--dtype", options.dtype, "fp32 or bf16")->check(CLI::IsMember({"fp32", "bf16"}));
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.contexts = {1024};
    options.compared_context = 1024;
    options.repeats = options.pairs = 1;
  }
  ordered_json report = ReportHead(options.commit, argc, argv);
  const absl::Status status = Measure(options, report);
  if (!status.ok()) {
    std::cerr << "upipe_bench_methods: " << status.message() << "\n";
    return 1;
  }
  return WriteReport(report, options.output) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::bench

int main(int argc, char** argv) { return upipe::bench::Main(argc, argv); }
