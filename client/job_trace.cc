#include "client/job_trace.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/follow.h"
#include "client/job_files.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/metrics/timeline_line.h"
#include "common/status.h"
#include "common/trace/step_trace.h"

namespace upipe::client {
namespace {

// The newest lines of a rank, unless a step is asked for.
constexpr int64_t kNewestBytes = 8 << 20;
constexpr size_t kStepsTold = 20;

using Timelines = std::map<int64_t, std::vector<v1::StepTimeline>>;  // by step

// Adds those of one rank; a step that was recorded twice counts once.
absl::Status ReadRank(Console& console, const v1::LogsRequest& request,
                      const std::optional<int64_t>& step, std::vector<int64_t>& seen,
                      Timelines& timelines) {
  std::map<int64_t, v1::StepTimeline> of_rank;
  int64_t torn = 0;
  const absl::Status read = ReadLines(console, request, [&](absl::string_view line) {
    absl::StatusOr<v1::StepTimeline> timeline = ParseTimelineLine(line);
    torn += !timeline.ok();
    if (!timeline.ok()) return;
    seen.push_back(timeline->step());
    if (step && timeline->step() != *step) return;
    of_rank[timeline->step()] = *std::move(timeline);
  });
  for (auto& [number, timeline] : of_rank) timelines[number].push_back(std::move(timeline));
  if (read.ok() && torn > 0) {
    return absl::DataLossError(absl::StrCat(torn, " lines could not be read"));
  }
  return read;
}

absl::Status NoSuchStep(const std::string& job, const std::optional<int64_t>& step,
                        std::vector<int64_t> seen, const std::string& why) {
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  if (!step || seen.empty()) {
    return RpcError(Reason::kLogNotFound,
                    absl::StrCat("no timeline of job ", job, " can be read",
                                 why.empty() ? ": none was recorded" : absl::StrCat(": ", why)),
                    {{"job", job}});
  }
  const size_t first = seen.size() > kStepsTold ? seen.size() - kStepsTold : 0;
  return RpcError(Reason::kLogNotFound,
                  absl::StrCat("step ", *step, " of job ", job, " was not recorded; ",
                               first > 0 ? "the newest that were: " : "those that were: ",
                               absl::StrJoin(seen.begin() + static_cast<std::ptrdiff_t>(first),
                                             seen.end(), ", ")),
                  {{"job", job}});
}

// The newest step that most ranks have.
const std::vector<v1::StepTimeline>& Best(const Timelines& timelines) {
  const auto* best = &timelines.begin()->second;
  for (const auto& [step, ranks] : timelines) {
    if (ranks.size() >= best->size()) best = &ranks;
  }
  return *best;
}

struct Trace {
  std::string text;
  std::string words;  // what it is of
  std::string job;    // its id
};

absl::StatusOr<Trace> MakeTrace(Console& console, const TraceOptions& options) {
  UPIPE_ASSIGN_OR_RETURN(const std::string id, ResolveJob(console, options.job));
  UPIPE_ASSIGN_OR_RETURN(const v1::Job job, console.coordinator.GetJob(id));
  std::vector<int> ranks;
  for (int rank = 0; rank < job.ranks_size() && !options.rank; ++rank) ranks.push_back(rank);
  if (ranks.empty()) ranks.push_back(options.rank.value_or(0));
  Timelines timelines;
  std::vector<int64_t> seen;
  std::vector<std::string> failures;
  absl::Status away;  // of the first worker that may have what is looked for
  for (const int rank : ranks) {
    v1::LogsRequest request;
    request.set_id(id);
    request.set_rank(rank);
    request.set_generation(options.generation);
    request.set_file(v1::RANK_FILE_TIMELINES);
    if (!options.step) request.set_offset(-kNewestBytes);
    const absl::Status read = ReadRank(console, request, options.step, seen, timelines);
    if (HasReason(read, Reason::kJobNotStarted) || absl::IsInvalidArgument(read)) return read;
    if (!read.ok()) failures.push_back(Missing(request, read));
    if (IsOutage(read)) away.Update(read);
  }
  if (timelines.empty()) {
    UPIPE_RETURN_IF_ERROR(away);
    return NoSuchStep(id, options.step, seen, failures.empty() ? "" : failures.front());
  }
  for (const std::string& failure : failures) {
    Warn(console, absl::StrCat("not in the trace: ", failure));
  }
  const std::vector<v1::StepTimeline>& steps = Best(timelines);
  return Trace{trace::StepTrace(id, steps),
               absl::StrCat("step ", steps.front().step(), " of ", steps.size(),
                            steps.size() == 1 ? " rank" : " ranks"),
               id};
}

}  // namespace

int JobTrace(Console& console, const TraceOptions& options) {
  const absl::StatusOr<Trace> trace = MakeTrace(console, options);
  if (!trace.ok()) return Report(console, trace.status());
  const std::string path =
      options.path.empty() ? absl::StrCat(trace->job, "-trace.json") : options.path;
  const absl::Status written = WriteWhole(path, trace->text);
  if (!written.ok()) return Report(console, written);
  console.out << path << ": " << trace->words << "\n";
  return kExitDone;
}

}  // namespace upipe::client
