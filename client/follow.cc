#include "client/follow.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/render.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/status.h"

namespace upipe::client {

bool IsOutage(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
}

bool Outage::PauseBeforeRetry(const absl::Status& status) {
  if (retries_ == 0) began_ = console_.clock.Now();
  if (retries_ == 1) {  // a connection the server only renews is back at once and not worth a word
    Note(console_,
         absl::StrCat(status.message(), "; trying again for ", absl::ToInt64Seconds(limit_), " s"));
  }
  if (console_.clock.Now() - began_ >= limit_) return false;
  ++retries_;
  console_.pause(pause_);
  pause_ = std::min(pause_ * 2, absl::Seconds(5));
  return true;
}

absl::StatusOr<std::string> ResolveJob(Console& console, const std::string& text) {
  if (text.empty()) {
    return RpcError(Reason::kJobNotFound, "the job's id is empty; `upipe list` shows all");
  }
  const absl::StatusOr<v1::Job> exact = console.coordinator.GetJob(text);
  if (exact.ok()) return exact->id();
  if (!HasReason(exact.status(), Reason::kJobNotFound)) return exact.status();
  std::vector<std::string> matches;
  v1::ListJobsRequest request;
  request.set_page_size(1000);
  request.set_id_prefix(text);
  do {
    UPIPE_ASSIGN_OR_RETURN(const v1::ListJobsResponse page, console.coordinator.ListJobs(request));
    for (const v1::Job& job : page.jobs()) matches.push_back(job.id());
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  if (matches.empty()) {
    return RpcError(
        Reason::kJobNotFound,
        absl::StrCat("no job's id is or begins with '", text, "'; `upipe list` shows all"),
        {{"job", text}});
  }
  if (matches.size() > 1) {
    const size_t count = matches.size();
    matches.resize(std::min<size_t>(count, 5));
    const std::string first = absl::StrCat(absl::StrJoin(matches, ", "), count > 5 ? ", .." : "");
    return RpcError(Reason::kJobAmbiguous,
                    absl::StrCat("'", text, "' begins the ids of ", count, " jobs: ", first),
                    {{"job", text}, {"jobs", count}});
  }
  return matches[0];
}

absl::Status FollowJob(Console& console, const std::string& id, absl::Duration limit,
                       const CoordinatorClient::OnWatch& on_message) {
  const BootTime end = console.clock.Now() + limit;
  std::optional<Outage> outage(std::in_place, console, kFirstContactLimit);
  while (true) {
    const absl::Duration left = end - console.clock.Now();
    if (left <= absl::ZeroDuration()) {
      return RpcError(Reason::kJobNotEnded, absl::StrCat("job ", id, " did not end within ",
                                                         absl::FormatDuration(limit)));
    }
    bool done = false, heard = false;
    const absl::Status status =
        console.coordinator.Watch(id, left, [&](const v1::WatchResponse& message) {
          heard = true;
          done = !on_message(message) || (message.has_job() && IsTerminal(message.job().state()));
          return !done;
        });
    if (done) return absl::OkStatus();
    if (console.clock.Now() >= end) continue;
    if (!status.ok() && !IsOutage(status)) return status;
    const absl::Status lost =
        status.ok() ? RpcError(Reason::kCallDropped, "the coordinator ended the watch") : status;
    if (heard) outage.emplace(console, kOutageLimit);
    if (!outage->PauseBeforeRetry(lost)) return lost;
  }
}

}  // namespace upipe::client
