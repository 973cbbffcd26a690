#include "tools/report/run_record.h"

#include <google/protobuf/util/json_util.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/metrics/step_line.h"
#include "common/metrics/timeline_line.h"
#include "common/status.h"
#include "planner/plan.h"

namespace upipe::report {
namespace {

using nlohmann::json;

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  if (!in || !(text << in.rdbuf())) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  return text.str();
}

absl::Status ParseMessage(const std::string& text, const std::string& where,
                          google::protobuf::Message& message) {
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto status = google::protobuf::util::JsonStringToMessage(text, &message, options);
  if (status.ok()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(where, " is no ", message.GetDescriptor()->name(), ": ",
                                          std::string(status.message())));
}

// Calls take(line) for every line of a metrics.jsonl.
template <typename Take>
absl::Status ReadStepLines(const std::string& path, const Take& take) {
  UPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    if (line.empty()) continue;
    absl::StatusOr<StepLine> read = ParseStepLine(line);
    if (!read.ok()) {
      return absl::DataLossError(absl::StrCat(path, ":", number, ": ", read.status().message()));
    }
    take(*std::move(read));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepReports> ReadStepReports(const std::string& path) {
  StepReports reports;
  UPIPE_RETURN_IF_ERROR(
      ReadStepLines(path, [&](StepLine line) { reports.push_back(std::move(line.report)); }));
  std::stable_sort(reports.begin(), reports.end(),
                   [](const auto& a, const auto& b) { return a.step() < b.step(); });
  return reports;
}

// The last line of a timeline.jsonl that is one; absent: none is.
absl::StatusOr<std::optional<v1::StepTimeline>> ReadTimeline(const std::string& path) {
  UPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  std::optional<v1::StepTimeline> newest;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    absl::StatusOr<v1::StepTimeline> timeline = ParseTimelineLine(line);
    if (timeline.ok()) newest = *std::move(timeline);
  }
  return newest;
}

// <state_dir>/**/jobs/<job>/metrics.jsonl of the coordinator, and of the workers
// <state_dir>/**/ranks/<job>/g<generation>/r<rank>/metrics.jsonl.
absl::Status ReadSteps(const std::string& state_dir, RunRecord& record) {
  const v1::Job& job = record.job;
  const int num_ranks = job.plan().spec().parallel().ranks();
  record.ranks.resize(num_ranks);
  std::error_code error;
  std::filesystem::recursive_directory_iterator files(state_dir, error), end;
  for (; !error && files != end; files.increment(error)) {
    const std::string path = files->path().string();
    if (absl::EndsWith(path, absl::StrCat("/jobs/", job.id(), "/metrics.jsonl"))) {
      UPIPE_ASSIGN_OR_RETURN(record.steps, ReadStepReports(path));
    }
    const std::string timeline = absl::StrCat("/ranks/", job.id(), "/g", job.generation(), "/r",
                                              FullestRank(job.plan()), "/timeline.jsonl");
    if (absl::EndsWith(path, timeline)) {
      UPIPE_ASSIGN_OR_RETURN(record.timeline, ReadTimeline(path));
    }
    for (int rank = 0; rank < num_ranks; ++rank) {
      const std::string suffix =
          absl::StrCat("/ranks/", job.id(), "/g", job.generation(), "/r", rank, "/metrics.jsonl");
      if (!absl::EndsWith(path, suffix)) continue;
      UPIPE_ASSIGN_OR_RETURN(record.ranks[rank], ReadStepReports(path));
    }
  }
  if (error)
    return absl::NotFoundError(absl::StrCat("cannot walk ", state_dir, ": ", error.message()));
  if (record.steps.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no jobs/", job.id(), "/metrics.jsonl of a coordinator with a step below ", state_dir));
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (record.ranks[rank].empty()) {
      return absl::FailedPreconditionError(absl::StrCat("no step record of rank ", rank, " of job ",
                                                        job.id(), " below ", state_dir));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<HeldOutText> ReadManifest(const std::string& data_dir) {
  const std::string path = absl::StrCat(data_dir, "/manifest.json");
  UPIPE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const json manifest = json::parse(text, nullptr, /*allow_exceptions=*/false);
  try {
    HeldOutText held_out = {.tokens = manifest.at("held_out").at("tokens"),
                            .unigram_nats = manifest.at("held_out").at("unigram_nats"),
                            .bigram_nats = manifest.at("held_out").at("bigram_nats"),
                            .train_tokens = manifest.at("train").at("tokens"),
                            .documents = manifest.at("source").at("documents")};
    for (const std::string input : manifest.at("options").at("inputs")) {
      absl::StrAppend(&held_out.source, held_out.source.empty() ? "" : ", ", input);
    }
    return held_out;
  } catch (const json::exception& error) {
    return absl::DataLossError(absl::StrCat(path, ": ", error.what()));
  }
}

absl::StatusOr<std::map<int, v1::MemoryUsage>> ReadMeasured(const std::string& path) {
  std::map<int, v1::MemoryUsage> memory;
  if (path.empty()) return memory;
  UPIPE_RETURN_IF_ERROR(
      ReadStepLines(path, [&](const StepLine& line) { memory[line.rank] = line.report.memory(); }));
  return memory;
}

Machine ThisMachine() {
  Machine machine;
  std::ifstream processors("/proc/cpuinfo");
  for (std::string line; std::getline(processors, line);) {
    if (!absl::StartsWith(line, "model name")) continue;
    machine.processor = std::string(absl::StripAsciiWhitespace(line.substr(line.find(':') + 1)));
    break;
  }
  machine.cores = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  machine.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  utsname name = {};
  if (uname(&name) == 0) machine.kernel = absl::StrCat(name.sysname, " ", name.release);
  return machine;
}

}  // namespace

v1::JobSpec AsUlysses(v1::JobSpec spec) {
  spec.mutable_parallel()->set_method(v1::METHOD_ULYSSES);
  spec.mutable_parallel()->clear_heads_per_stage();
  spec.mutable_parallel()->clear_ring_ranks();
  spec.mutable_memory()->clear_ring_kv();
  return spec;
}

absl::StatusOr<RunRecord> ReadRun(const RunFiles& files) {
  RunRecord record;
  UPIPE_ASSIGN_OR_RETURN(const std::string job, ReadFile(files.job));
  UPIPE_RETURN_IF_ERROR(ParseMessage(job, files.job, record.job));
  if (!record.job.has_plan()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", record.job.id(), " has no plan"));
  }
  UPIPE_RETURN_IF_ERROR(ReadSteps(files.state_dir, record));
  UPIPE_ASSIGN_OR_RETURN(record.text, ReadManifest(files.data_dir));
  planner::PlanLimits anything;
  anything.check_data = false;
  UPIPE_ASSIGN_OR_RETURN(record.ulysses,
                         planner::MakeRunPlan(AsUlysses(record.job.plan().spec()), anything));
  UPIPE_ASSIGN_OR_RETURN(record.ulysses_measured, ReadMeasured(files.ulysses_metrics));
  record.machine = ThisMachine();
  record.commit = files.commit;
  return record;
}

const v1::MemoryUsage& PlannedMemory(const v1::RunPlan& plan, int rank) {
  return plan.ranks(rank).memory();
}

}  // namespace upipe::report
