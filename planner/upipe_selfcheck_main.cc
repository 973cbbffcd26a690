// upipe-selfcheck: a job's self check (engine/train/selfcheck.h) in one process, one thread per
// rank, before the job is submitted.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/machine.h"
#include "common/parse_arguments.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/train/selfcheck.h"
#include "kernels/cpu/isa.h"
#include "planner/plan.h"
#include "planner/selfcheck_report.h"
#include "planner/selfcheck_threads.h"

namespace upipe::planner {
namespace {

struct Flags {
  std::string job_file;
  std::vector<std::string> overrides;
  int64_t steps = 3;
  std::string context;
  std::string format = "text";
};

struct Checked {
  v1::RunPlan plan;
  train::SelfCheckReport report;
};

absl::StatusOr<Checked> Run(const Flags& flags) {
  UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadJobSpecFile(flags.job_file, flags.overrides));
  UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
  train::SelfCheckOptions options{.steps = flags.steps};
  if (!flags.context.empty()) {
    UPIPE_ASSIGN_OR_RETURN(options.context, ParseTokenCount(flags.context));
  }
  options.memory_bytes = available / std::max(1, spec.parallel().ranks());
  Checked checked;
  // Its tokens are synthetic: the data may be elsewhere.
  UPIPE_ASSIGN_OR_RETURN(
      checked.plan,
      MakeRunPlan(spec, {.memory_per_rank_bytes = *options.memory_bytes, .check_data = false}));
  if (const std::string& cap = checked.plan.spec().parallel().isa_cap(); !cap.empty()) {
    UPIPE_RETURN_IF_ERROR(kernels::CapIsa(cap));
  }
  UPIPE_ASSIGN_OR_RETURN(checked.report, CheckOnThreads(checked.plan, options));
  return checked;
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Trains a few short steps with all ranks of a job and with one of them alone, and compares:\n"
      "losses, every gradient, valid tokens, what documents and later tokens may not reach, "
      "bytes.\n"
      "In this process, one thread per rank; `train.selfcheck: true` does it where the job runs.\n"
      "Leaves with 0 when it passes, 1 when it fails, 2 when it cannot be run.\n"
      "Example: upipe selfcheck deploy/samples/tiny.yaml"};
  Flags flags;
  app.add_option("job", flags.job_file, "job file (YAML)")->required();
  app.add_option("--set", flags.overrides, "override a field, path=value (repeatable)")
      ->allow_extra_args(false);
  app.add_option("--steps", flags.steps, "steps to train, 1 to 1000 (default 3)");
  app.add_option(
      "--context", flags.context,
      "tokens of a sequence, e.g. 2K (default: a few times what contexts are padded to)");
  app.add_option("-o,--output", flags.format, "text or json")
      ->check(CLI::IsMember({"text", "json"}));
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  const absl::StatusOr<Checked> checked = Run(flags);
  if (!checked.ok()) {
    std::cerr << "upipe-selfcheck: " << checked.status().message() << "\n";
    return 2;
  }
  std::cout << (flags.format == "json" ? absl::StrCat(SelfCheckJson(checked->report), "\n")
                                       : RenderSelfCheck(checked->plan, checked->report));
  return checked->report.passed() ? 0 : 1;
}

}  // namespace
}  // namespace upipe::planner

int main(int argc, char** argv) { return upipe::planner::Main(argc, argv); }
