#include "client/job_files.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/follow.h"
#include "client/new_file.h"
#include "common/errors/rpc_error.h"
#include "common/status.h"

namespace upipe::client {
namespace {

// No line that is worth reading is longer: what goes on without an end is dropped.
constexpr size_t kMostLineBytes = 32 << 20;

// Cuts a run of bytes into lines.
class LineCutter {
 public:
  LineCutter(bool begins_inside, const std::function<void(absl::string_view)>& take)
      : skipping_(begins_inside), take_(take) {}

  void Take(absl::string_view data) {
    for (size_t end; (end = data.find('\n')) != absl::string_view::npos;) {
      if (!skipping_) {
        line_.append(data.data(), end);
        if (!line_.empty()) take_(line_);
      }
      line_.clear();
      skipping_ = false;
      data.remove_prefix(end + 1);
    }
    if (line_.size() + data.size() > kMostLineBytes) skipping_ = true;
    if (skipping_) line_.clear();
    if (!skipping_) line_.append(data.data(), data.size());
  }
  // Bytes are missing here: the line they were in is lost.
  void Gap() {
    line_.clear();
    skipping_ = true;
  }

 private:
  std::string line_;
  bool skipping_;
  const std::function<void(absl::string_view)>& take_;
};

// A file whose worker is away, or that is not there, is not waited for.
bool IsWorthARetry(const absl::Status& status) {
  return IsOutage(status) && !HasReason(status, Reason::kWorkerLost) &&
         !HasReason(status, Reason::kWorkerDisconnected) &&
         !HasReason(status, Reason::kLogUnreadable);
}

}  // namespace

absl::Status ReadLines(Console& console, v1::LogsRequest request,
                       const std::function<void(absl::string_view line)>& take) {
  std::optional<LineCutter> lines;
  std::optional<Outage> outage(std::in_place, console, kFirstContactLimit);
  while (true) {
    bool heard = false;
    const absl::Status status =
        console.coordinator.Logs(request, [&](const v1::LogsResponse& message) {
          heard = true;
          // Bytes from the end begin inside a line, unless they are all there are.
          if (!lines) lines.emplace(request.offset() < 0 && message.offset() > 0, take);
          if (!message.gap().empty()) lines->Gap();
          lines->Take(message.data());
          if (!message.data().empty()) {
            request.set_offset(message.offset() + static_cast<int64_t>(message.data().size()));
          }
          return true;
        });
    if (status.ok() || !IsWorthARetry(status)) return status;
    if (heard) outage.emplace(console, kFirstContactLimit);
    if (!outage->PauseBeforeRetry(status)) return status;
  }
}

std::string Missing(const v1::LogsRequest& request, const absl::Status& status) {
  const bool job = request.file() == v1::RANK_FILE_JOB_STEPS;
  const char* what = request.file() == v1::RANK_FILE_TIMELINES ? "the timelines" : "the steps";
  return absl::StrCat(
      what, " of ", job ? "the job" : absl::StrCat("rank ", request.rank()),
      request.generation() == 0 ? "" : absl::StrCat(" in generation ", request.generation()), ": ",
      status.message());
}

absl::Status WriteWhole(const std::string& path, const std::string& text) {
  UPIPE_ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path, 0666));
  UPIPE_RETURN_IF_ERROR(file.Write(text));
  return file.Commit();
}

}  // namespace upipe::client
