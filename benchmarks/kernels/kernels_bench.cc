// The cpu backend's ops beside the machine's own rates of the same moment, one thread: attention
// beside matmul, bf16 matmul beside fp32, ops bound by memory beside memcpy. Medians and spread go
// to JSON. Exits with 1 when the median of an attention row falls below the share of the matmul
// rate it is held to.
#include <iostream>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "benchmarks/kernels/attention_rows.h"
#include "benchmarks/kernels/cpu_bench.h"
#include "benchmarks/kernels/elementwise_rows.h"
#include "benchmarks/kernels/matmul_rows.h"
#include "benchmarks/support/bench_report.h"
#include "kernels/cpu/isa.h"

namespace upipe::kernels {
namespace {

struct Options {
  bool quick = false;
  std::string output;
  std::string commit = "unknown";
  std::vector<std::string> parts = {"matmul", "elementwise", "attention"};
  std::vector<int64_t> head_dims = {64, 128};
  std::vector<int64_t> tokens = {4096, 8192, 16384, 32768};
  int repeats = 7;
};

// Each part has its own tensors: a bench gives them back when it ends.
void MeasurePart(const Options& options, const std::string& part, nlohmann::ordered_json& rows) {
  if (part == "matmul") {
    CpuBench bench;
    AppendMatmulRows(bench, options.repeats, rows);
    return;
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (part == "elementwise") {
      CpuBench bench;
      AppendElementwiseRows(bench, dtype, options.repeats, rows);
      continue;
    }
    for (const int64_t head_dim : options.head_dims) {
      for (const int64_t tokens : options.tokens) {
        CpuBench bench;
        AppendAttentionRows(bench, dtype, tokens, head_dim, options.repeats, rows);
      }
    }
  }
}

// The share of the matmul rate that a row must reach; 0 for none.
double Bound(const nlohmann::ordered_json& row) {
  const bool bf16 = row["dtype"] == NameOf(DType::kBFloat16);
  if (row["op"] == "attention_fwd") return bf16 ? 0.5 : 0.8;
  if (row["op"] == "attention_bwd") return bf16 ? 0.4 : 0.6;
  return 0;
}

// 0 when every median is at or above its bound; says which is not.
int HeldToBounds(const nlohmann::ordered_json& rows) {
  int outcome = 0;
  for (const auto& row : rows) {
    if (row["ratio_median"].get<double>() >= Bound(row)) continue;
    std::cerr << "held to " << Bound(row) << " of the matmul rate: " << row.dump() << "\n";
    outcome = 1;
  }
  return outcome;
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Ops of the cpu backend beside the machine's matmul and memcpy rates, one thread");
  app.add_flag("--quick", options.quick, "Attention up to 8192 tokens, 3 repeats: a minute or two");
  app.add_option("--output", options.output, "JSON file; standard output when absent");
  app.add_option("--commit", options.commit, "Commit recorded in the JSON");
  app.add_option("--parts", options.parts, "matmul, elementwise, attention")
      ->check(CLI::IsMember({"matmul", "elementwise", "attention"}));
  app.add_option("--head-dim", options.head_dims, "Head sizes of attention");
  app.add_option("--tokens", options.tokens, "Sequence lengths of attention");
  app.add_option("--repeats", options.repeats, "Interleaved repeats of each row")
      ->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  if (options.quick) {
    options.tokens = {4096, 8192};
    options.repeats = 3;
  }
  nlohmann::ordered_json report = bench::ReportHead(options.commit, argc, argv);
  report["isa"] = DispatchedIsa();
  report["matmul_core"] = MatmulCore();
  report["rows"] = nlohmann::ordered_json::array();
  for (const std::string& part : options.parts) MeasurePart(options, part, report["rows"]);
  const bool written = bench::WriteReport(report, options.output);
  const int held = HeldToBounds(report["rows"]);
  return written ? held : 1;
}

}  // namespace
}  // namespace upipe::kernels

int main(int argc, char** argv) { return upipe::kernels::Main(argc, argv); }
