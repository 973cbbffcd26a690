// Plans of the real step on the dry device at contexts beyond the paper's, their step time by the
// device description, and how long this machine took to plan: a search at 5M tokens, and the plan
// of what it chose by itself.
#include <sys/resource.h>

#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "benchmarks/support/bench_report.h"
#include "common/parse_arguments.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "planner/notes.h"
#include "planner/plan.h"
#include "planner/render.h"

namespace upipe::bench {
namespace {

using nlohmann::ordered_json;
using planner::PlanLimits;

struct Setup {
  const char* model;
  int ranks;
  int64_t host_bytes;  // of a node
  const char* context;
};
constexpr int64_t kDeviceBytes = int64_t{80} << 30;
constexpr Setup kBeyond[] = {{"llama3-8b", 8, int64_t{2} << 40, "10M"},
                             {"llama3-8b", 8, int64_t{2} << 40, "12M"},
                             {"qwen3-32b", 16, int64_t{2} << 40, "8M"},
                             {"llama3-8b", 1, int64_t{512} << 30, "1M"}};
constexpr Setup kSearch = {"llama3-8b", 8, int64_t{2} << 40, "5M"};

double CpuSeconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Took {
  double seconds = 0;
  double cpu_seconds = 0;
};

template <typename Function>
auto Timed(Function function, Took& took) {
  const absl::Time start = absl::Now();
  const double cpu = CpuSeconds();
  auto result = function();
  took = {absl::ToDoubleSeconds(absl::Now() - start), CpuSeconds() - cpu};
  return result;
}

absl::StatusOr<v1::JobSpec> SpecOf(const Setup& setup) {
  return ParseJobSpecYaml(
      absl::StrCat("name: plan\nmodel: {preset: ", setup.model, "}\ndata: {path: none}\n",
                   "parallel: {ranks: ", setup.ranks, ", method: auto, backend: cuda}\n",
                   "memory: {policy: auto}\n", "train: {context: ", setup.context,
                   ", steps: 1, eval_sequences: 0, dtype: bf16}\n"),
      "plans");
}

PlanLimits LimitsOf(const Setup& setup) {
  PlanLimits limits;
  limits.memory_per_rank_bytes = kDeviceBytes;
  limits.host_memory_bytes = setup.host_bytes;
  limits.check_data = false;
  limits.must_run = false;
  limits.num_threads = static_cast<int>(std::thread::hardware_concurrency());
  limits.progress = [](const std::string& line) { std::cerr << line << std::endl; };
  return limits;
}

ordered_json RowOf(const Setup& setup, const v1::RunPlan& plan, const Took& took) {
  const v1::ParallelSpec& parallel = plan.spec().parallel();
  const planner::Taken taken = planner::TakenOf(plan);
  ordered_json row;
  row["model"] = setup.model;
  row["ranks"] = setup.ranks;
  row["device_memory_bytes"] = kDeviceBytes;
  row["host_memory_bytes"] = setup.host_bytes;
  row["context"] = plan.spec().train().context();
  row["method"] = MethodName(parallel.method());
  row["mesh"] = planner::MeshText(parallel);
  row["heads_per_stage"] = parallel.heads_per_stage();
  row["policy"] = planner::PolicyText(plan.spec().memory());
  row["attention_kernel"] = plan.attention_kernel();
  row["device_bytes"] = taken.device_bytes;
  row["host_bytes"] = taken.host_bytes;
  row["step_seconds"] = plan.step_time().seconds();
  row["tokens_per_second_per_rank"] = plan.step_time().tokens_per_second_per_rank();
  row["causal_mfu"] = plan.step_time().causal_mfu();
  row["points_priced"] = plan.searched();
  row["planning_seconds"] = took.seconds;
  row["planning_cpu_seconds"] = took.cpu_seconds;
  return row;
}

absl::Status Run(ordered_json& report) {
  Took took;
  for (const Setup& setup : kBeyond) {
    UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, SpecOf(setup));
    const PlanLimits limits = LimitsOf(setup);
    UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan,
                           Timed([&] { return planner::MakeRunPlan(spec, limits); }, took));
    report["beyond"].push_back(RowOf(setup, plan, took));
  }
  UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, SpecOf(kSearch));
  const PlanLimits limits = LimitsOf(kSearch);
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan searched,
                         Timed([&] { return planner::MakeRunPlan(spec, limits); }, took));
  report["search"] = RowOf(kSearch, searched, took);
  UPIPE_ASSIGN_OR_RETURN(
      const v1::RunPlan named,
      Timed([&] { return planner::MakeRunPlan(searched.spec(), limits); }, took));
  report["named"] = RowOf(kSearch, named, took);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app{"Plans published models at contexts beyond the paper's, and times planning."};
  std::string output, commit = "unknown";
  app.add_option("--output", output, "JSON file; absent: standard output");
  app.add_option("--commit", commit, "kept in the report");
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  ordered_json report = ReportHead(commit, argc, argv);
  if (const absl::Status status = Run(report); !status.ok()) {
    std::cerr << "upipe_bench_plans: " << status.message() << "\n";
    return 1;
  }
  return WriteReport(report, output) ? 0 : 1;
}

}  // namespace
}  // namespace upipe::bench

int main(int argc, char** argv) { return upipe::bench::Main(argc, argv); }
