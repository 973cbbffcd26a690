// `upipe logs`: the bytes of one rank's log, from the start or its last lines, then as they come.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"
#include "client/follow.h"
#include "client/render.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/status.h"

namespace upipe::client {
namespace {

// Read backwards for --tail: lines longer than this on average are cut off at the front.
constexpr int64_t kTailBytesPerLine = 512;
constexpr int64_t kMaxTailBytes = 8 << 20;

// The last `lines` lines of `text`.
absl::string_view LastLines(absl::string_view text, int64_t lines) {
  if (lines <= 0) return absl::string_view();
  size_t from = text.size();
  if (from > 0 && text[from - 1] == '\n') --from;  // the newline that ends the last line
  while (from > 0) {
    if (text[from - 1] == '\n' && --lines == 0) break;
    --from;
  }
  return text.substr(from);
}

// Reads one rank's log, remembering how far it got, so that a lost connection costs nothing.
class LogReader {
 public:
  // `may_begin`: the rank may still have to be started, so a missing log is waited for.
  LogReader(Console& console, v1::LogsRequest request, bool may_begin)
      : console_(console), request_(std::move(request)), may_begin_(may_begin) {}

  // Prints all there is from the offset on; with follow, until the rank is gone.
  absl::Status Print(bool follow) {
    request_.set_follow(follow);
    return ReadPersistently([&](const std::string& data) { console_.out << data << std::flush; });
  }

  // Prints the last `lines` lines there are now.
  absl::Status PrintTail(int64_t lines) {
    request_.set_follow(false);
    request_.set_offset(-std::clamp(lines * kTailBytesPerLine, int64_t{1}, kMaxTailBytes));
    std::string text;
    const absl::Status read = ReadPersistently([&](const std::string& data) { text += data; });
    if (request_.offset() < 0) request_.set_offset(0);  // nothing there yet
    console_.out << LastLines(text, lines) << std::flush;
    return read;
  }

 private:
  template <typename OnData>
  absl::Status ReadPersistently(OnData on_data) {
    std::optional<Outage> outage(std::in_place, console_, kFirstContactLimit);
    while (true) {
      bool heard = false;
      const absl::Status status =
          console_.coordinator.Logs(request_, [&](const v1::LogsResponse& message) {
            heard = heard_ = true;
            if (!message.gap().empty()) Note(console_, absl::StrCat("[", message.gap(), "]"));
            on_data(message.data());
            if (!message.data()
                     .empty()) {  // an empty one only says that the rank's worker is there
              request_.set_offset(message.offset() + static_cast<int64_t>(message.data().size()));
            }
            return true;
          });
      if (!IsWorthARetry(status)) return status;
      if (heard) outage.emplace(console_, kOutageLimit);
      if (!outage->PauseBeforeRetry(status)) return status;
    }
  }

  // A log whose worker is away is not waited for, unless it was being read.
  bool IsWorthARetry(const absl::Status& status) const {
    if (HasReason(status, Reason::kWorkerLost)) return false;
    if (HasReason(status, Reason::kWorkerDisconnected)) return heard_;
    if (HasReason(status, Reason::kLogNotFound)) return may_begin_ && !heard_;
    return IsOutage(status);
  }

  Console& console_;
  v1::LogsRequest request_;
  const bool may_begin_;
  bool heard_ = false;
};

// Follows the job until `enough` holds of it.
template <typename Enough>
absl::StatusOr<v1::Job> AwaitJob(Console& console, const std::string& id, Enough enough) {
  v1::Job job;
  const absl::Status followed =
      FollowJob(console, id, absl::InfiniteDuration(), [&](const v1::WatchResponse& message) {
        if (message.has_job()) job = message.job();
        return !enough(job);
      });
  if (!followed.ok()) return followed;
  return job;
}

// Waits until the job is placed, saying once what it waits for.
absl::StatusOr<v1::Job> AwaitStart(Console& console, const std::string& id) {
  bool told = false;
  return AwaitJob(console, id, [&](const v1::Job& job) {
    if (job.state() != v1::JOB_STATE_PLANNING && job.state() != v1::JOB_STATE_QUEUED) return true;
    if (!told) {
      Note(console,
           absl::StrCat("upipe: ", id, " is ", ShownState(job), ": the log begins when it starts",
                        job.reason().empty() ? "" : "; ", job.reason()));
    }
    told = true;
    return false;
  });
}

v1::LogsRequest RequestOf(const LogsOptions& options, const std::string& id, int64_t generation) {
  v1::LogsRequest request;
  request.set_id(id);
  request.set_rank(options.rank);
  request.set_generation(generation);
  return request;
}

absl::Status PrintLog(Console& console, const LogsOptions& options, const std::string& id) {
  LogReader reader(console, RequestOf(options, id, options.generation), /*may_begin=*/false);
  return options.tail.has_value() ? reader.PrintTail(*options.tail) : reader.Print(false);
}

// One attempt after the other, until the job ends, or only the one that was asked for.
absl::Status FollowLog(Console& console, const LogsOptions& options, const std::string& id) {
  UPIPE_ASSIGN_OR_RETURN(v1::Job job, AwaitStart(console, id));
  int64_t generation = options.generation == 0 ? job.generation() : options.generation;
  bool tail = options.tail.has_value();
  while (true) {
    const bool may_begin = !IsTerminal(job.state()) && generation == job.generation();
    LogReader reader(console, RequestOf(options, id, generation), may_begin);
    if (tail) UPIPE_RETURN_IF_ERROR(reader.PrintTail(*options.tail));
    tail = false;
    UPIPE_RETURN_IF_ERROR(reader.Print(true));
    if (options.generation != 0) return absl::OkStatus();
    UPIPE_ASSIGN_OR_RETURN(job, AwaitJob(console, id, [&](const v1::Job& now) {
                             return IsTerminal(now.state()) || now.generation() > generation;
                           }));
    if (job.generation() <= generation) break;
    generation = job.generation();
    Note(console, absl::StrCat("upipe: ", id, " was started again: generation ", generation));
  }
  Note(console, absl::StrCat("upipe: ", EndLine(job)));
  return absl::OkStatus();
}

}  // namespace

int Logs(Console& console, const LogsOptions& options) {
  const absl::StatusOr<std::string> id = ResolveJob(console, options.job);
  if (!id.ok()) return Report(console, id.status());
  const absl::Status status =
      options.follow ? FollowLog(console, options, *id) : PrintLog(console, options, *id);
  return status.ok() ? kExitDone : Report(console, status);
}

}  // namespace upipe::client
