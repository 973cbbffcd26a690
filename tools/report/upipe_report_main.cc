// upipe-report: a finished run's files -> summary.json, report.html and a few lines on the
// terminal.
#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/parse_arguments.h"
#include "common/status.h"
#include "planner/timeline.h"
#include "tools/report/page.h"
#include "tools/report/run_record.h"
#include "tools/report/summary.h"

namespace upipe::report {
namespace {

constexpr size_t kStepColumns = 240;

struct Flags {
  RunFiles files;
  std::string output;
  std::optional<double> margin_nats;
};

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::trunc);
  if (!(out << text) || !out.flush())
    return absl::PermissionDeniedError(absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

// The step of the fullest rank, moment by moment.
absl::StatusOr<std::vector<planner::TimelineMoment>> StepOf(const v1::RunPlan& plan) {
  UPIPE_ASSIGN_OR_RETURN(planner::Timeline timeline,
                         planner::RecordTimeline(plan, FullestRank(plan)));
  std::vector<planner::TimelineMoment>& moments = timeline.moments;
  moments.erase(moments.begin());
  std::erase_if(moments, [](const auto& it) { return it.at.pass == StepPass::kEvaluate; });
  return planner::Thin(moments, kStepColumns);
}

// True when the run is what it should be.
absl::StatusOr<bool> Report(const Flags& flags) {
  UPIPE_ASSIGN_OR_RETURN(const RunRecord record, ReadRun(flags.files));
  const Summary summary = Summarize(record, flags.margin_nats);
  PageInput page = {.record = record, .summary = summary, .step = {}, .ulysses_step = {}};
  UPIPE_ASSIGN_OR_RETURN(page.step, StepOf(record.job.plan()));
  UPIPE_ASSIGN_OR_RETURN(page.ulysses_step, StepOf(record.ulysses));
  UPIPE_RETURN_IF_ERROR(
      WriteFile(flags.output + "/summary.json", SummaryJson(summary, record).dump(2) + "\n"));
  UPIPE_RETURN_IF_ERROR(WriteFile(flags.output + "/report.html", RenderPage(page)));
  std::cout << SummaryText(summary, record);
  return summary.failures.empty();
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Writes summary.json and report.html of a finished job and compares its memory with "
      "DeepSpeed-Ulysses.\n"
      "Exit code 1 when the run is not what it should be; summary.json says why."};
  Flags flags;
  app.add_option("--job", flags.files.job, "output of `upipe describe JOB -o json`")->required();
  app.add_option("--state-dir", flags.files.state_dir,
                 "folder above the state folders of the coordinator and the workers")
      ->required();
  app.add_option("--data", flags.files.data_dir, "folder written by `upipe data pack`")->required();
  app.add_option("--ulysses-metrics", flags.files.ulysses_metrics,
                 "`upipe run --metrics` file of the same model with method ulysses, to show "
                 "measured bytes beside planned");
  app.add_option("--commit", flags.files.commit, "shown with the machine");
  app.add_option(
      "--margin", flags.margin_nats,
      "nats the held-out loss must be under the unigram entropy (default: not demanded)");
  app.add_option("--output", flags.output, "existing folder")
      ->required()
      ->check(CLI::ExistingDirectory);
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  const absl::StatusOr<bool> good = Report(flags);
  if (good.ok()) return *good ? 0 : 1;
  std::cerr << "upipe-report: " << good.status().message() << "\n";
  return 1;
}

}  // namespace
}  // namespace upipe::report

int main(int argc, char** argv) { return upipe::report::Main(argc, argv); }
