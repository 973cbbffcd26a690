#include "client/job_page.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "client/follow.h"
#include "client/job_files.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/metrics/step_line.h"
#include "common/metrics/timeline_line.h"
#include "common/report/job_page.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::client {
namespace {

// Enough for the newest timeline.
constexpr int64_t kTimelineBytes = 8 << 20;

// Reads the record of one job; what is not there is said in `record.missing`.
class RecordReader {
 public:
  RecordReader(Console& console, report::JobRecord& record) : console_(console), record_(record) {}

  void Read() {
    const v1::Job& job = record_.job;
    if (job.generation() == 0) return;  // never placed: nothing was recorded
    ReadSteps(Request(v1::RANK_FILE_JOB_STEPS, 0, 0), record_.steps);
    const int fullest = report::FullestRank(job.plan());
    const bool all_of_rank_0 = record_.steps.empty();
    for (const int64_t generation : Generations()) {
      ReadSteps(Request(v1::RANK_FILE_STEPS, fullest, generation), record_.fullest);
      // Where the coordinator has no file: those of rank 0 itself.
      if (all_of_rank_0) ReadSteps(Request(v1::RANK_FILE_STEPS, 0, generation), record_.steps);
    }
    if (record_.steps.missing_steps() > 0) FillFromRank0(fullest);
    ReadTimeline(fullest);
  }

 private:
  // What the coordinator could not take, rank 0's worker may have; else the page counts it.
  void FillFromRank0(int fullest) {
    report::StepSeries own = record_.fullest;
    if (fullest != 0) {
      own = {};
      const size_t known = record_.missing.size();
      for (const int64_t generation : Generations()) {
        ReadSteps(Request(v1::RANK_FILE_STEPS, 0, generation), own);
      }
      record_.missing.resize(known);
    }
    if (own.points().size() > record_.steps.points().size()) record_.steps = std::move(own);
  }

  // Ended ones that are known, then the latest, ascending.
  std::vector<int64_t> Generations() const {
    std::vector<int64_t> generations;
    for (const v1::AttemptSummary& attempt : record_.job.attempts()) {
      if (attempt.generation() != record_.job.generation()) {
        generations.push_back(attempt.generation());
      }
    }
    generations.push_back(record_.job.generation());
    return generations;
  }

  v1::LogsRequest Request(v1::RankFile file, int rank, int64_t generation) const {
    v1::LogsRequest request;
    request.set_id(record_.job.id());
    request.set_file(file);
    request.set_rank(rank);
    request.set_generation(generation);
    return request;
  }

  void ReadSteps(const v1::LogsRequest& request, report::StepSeries& steps) {
    int64_t torn = 0;
    const absl::Status read = ReadLines(console_, request, [&](absl::string_view line) {
      absl::StatusOr<StepLine> step = ParseStepLine(line);
      torn += !step.ok();
      if (step.ok()) steps.Take(std::move(step->report), step->missing_steps);
    });
    if (torn > 0) {
      record_.missing.push_back(absl::StrCat(
          Missing(request, absl::DataLossError(absl::StrCat(torn, " lines could not be read")))));
    }
    // An attempt that ended before its first step has none.
    if (!read.ok() && !IsNoStep(request, read)) record_.missing.push_back(Missing(request, read));
  }

  bool IsNoStep(const v1::LogsRequest& request, const absl::Status& status) const {
    if (!HasReason(status, Reason::kLogNotFound)) return false;
    if (request.file() == v1::RANK_FILE_JOB_STEPS) return !record_.job.has_last_report();
    for (const v1::AttemptSummary& attempt : record_.job.attempts()) {
      if (attempt.generation() == request.generation()) return attempt.last_step() == 0;
    }
    return !record_.job.has_last_report();
  }

  // The newest timeline of the latest attempt that has one.
  void ReadTimeline(int rank) {
    const std::vector<int64_t> generations = Generations();
    for (auto generation = generations.rbegin(); generation != generations.rend(); ++generation) {
      v1::LogsRequest request = Request(v1::RANK_FILE_TIMELINES, rank, *generation);
      request.set_offset(-kTimelineBytes);
      const absl::Status read = ReadLines(console_, request, [&](absl::string_view line) {
        absl::StatusOr<v1::StepTimeline> timeline = ParseTimelineLine(line);
        if (timeline.ok()) record_.timeline = *std::move(timeline);
      });
      if (record_.timeline) return;
      if (!read.ok() && !HasReason(read, Reason::kLogNotFound)) {
        record_.missing.push_back(Missing(request, read));
      }
    }
  }

  Console& console_;
  report::JobRecord& record_;
};

void ReadVersions(Console& console, report::JobRecord& record) {
  const absl::StatusOr<v1::ListNodesResponse> nodes = console.coordinator.ListNodes();
  if (!nodes.ok()) return;
  record.versions.emplace_back("coordinator", nodes->coordinator_version());
  for (const v1::Node& node : nodes->nodes()) {
    for (const v1::RankStatus& rank : record.job.ranks()) {
      if (rank.node() != node.worker()) continue;
      record.versions.emplace_back(
          node.worker(), absl::StrCat(node.version(), ", ", node.backend(), ", ", node.isa(),
                                      ", node ", node.node_id()));
      break;
    }
  }
}

absl::StatusOr<report::JobRecord> ReadRecord(Console& console, const std::string& job) {
  UPIPE_ASSIGN_OR_RETURN(const std::string id, ResolveJob(console, job));
  report::JobRecord record;
  UPIPE_ASSIGN_OR_RETURN(record.job, console.coordinator.GetJob(id));
  record.made_unix_millis = console.clock.UnixMillis();
  RecordReader(console, record).Read();
  ReadVersions(console, record);
  return record;
}

}  // namespace

int JobReport(Console& console, const ReportOptions& options) {
  const absl::StatusOr<report::JobRecord> record = ReadRecord(console, options.job);
  if (!record.ok()) return Report(console, record.status());
  const std::string page = report::RenderJobPage(*record);
  const std::string path =
      options.path.empty() ? absl::StrCat(record->job.id(), ".html") : options.path;
  const absl::Status written = WriteWhole(path, page);
  if (!written.ok()) return Report(console, written);
  for (const std::string& missing : record->missing)
    Warn(console, absl::StrCat("not on the page: ", missing));
  console.out << path << ": " << record->job.id() << ", "
              << FormatBytes(static_cast<int64_t>(page.size())) << "\n";
  return kExitDone;
}

}  // namespace upipe::client
