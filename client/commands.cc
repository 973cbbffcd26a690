#include "client/commands.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/follow.h"
#include "client/live_view.h"
#include "client/render.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/ids.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"

namespace upipe::client {
namespace {

absl::Time Now(const Console& console) { return absl::FromUnixMillis(console.clock.UnixMillis()); }

// The exit code of a job that has ended; a failure is told on `err` too, unless the job's JSON has
// told it.
int Outcome(Console& console, const v1::Job& job) {
  if (job.state() == v1::JOB_STATE_SUCCEEDED) return kExitDone;
  if (job.state() == v1::JOB_STATE_CANCELLED) return kExitCancelled;
  if (!console.json) {
    console.err << "job " << job.id() << " " << ShownState(job) << ":\n"
                << RenderCause(job.cause(), 2);
  }
  return kExitFailed;
}

// A job in a line, or whole in JSON.
std::string JobAnswer(const Console& console, const v1::Job& job) {
  return console.json ? RenderJson(job) : absl::StrCat(job.id(), "  ", ShownState(job), "\n");
}

// Asks for one change of a job and shows the job it answers with.
template <typename Call>
int Change(Console& console, const std::string& text, Call call) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::Job> job = call(*id);
  if (!job.ok()) return Report(console, job.status());
  console.out << JobAnswer(console, *job);
  return kExitDone;
}

// The same request until the coordinator answers: its id makes a repeated request harmless.
absl::StatusOr<v1::Job> SubmitPersistently(Console& console, const v1::SubmitRequest& request) {
  Outage outage(console, kFirstContactLimit);
  while (true) {
    absl::StatusOr<v1::Job> job = console.coordinator.Submit(request);
    if (job.ok() || !IsOutage(job.status()) || !outage.PauseBeforeRetry(job.status())) return job;
  }
}

// The job once its plan is made or refused.
absl::StatusOr<v1::Job> AwaitPlan(Console& console, v1::Job job) {
  if (job.state() != v1::JOB_STATE_PLANNING) return job;
  const absl::Status followed =
      FollowJob(console, job.id(), absl::InfiniteDuration(), [&](const v1::WatchResponse& message) {
        if (message.has_job()) job = message.job();
        return job.state() == v1::JOB_STATE_PLANNING;
      });
  if (!followed.ok()) return followed;
  return job;
}

// Every message as a line of JSON; the last job.
absl::StatusOr<v1::Job> PrintMessages(Console& console, const std::string& id) {
  v1::Job job;
  const absl::Status followed =
      FollowJob(console, id, absl::InfiniteDuration(), [&](const v1::WatchResponse& message) {
        if (message.has_job()) job = message.job();
        console.out << RenderJsonLine(message) << std::flush;
        return true;
      });
  if (!followed.ok()) return followed;
  return job;
}

absl::StatusOr<v1::Job> ShowProgress(Console& console, const std::string& id) {
  LiveView view(console);
  const absl::Status followed =
      FollowJob(console, id, absl::InfiniteDuration(), [&](const v1::WatchResponse& message) {
        view.Show(message);
        return true;
      });
  view.Finish();
  if (!followed.ok()) return followed;
  return view.job();
}

int WatchJob(Console& console, const std::string& id) {
  const absl::StatusOr<v1::Job> job =
      console.json ? PrintMessages(console, id) : ShowProgress(console, id);
  return job.ok() ? Outcome(console, *job) : Report(console, job.status());
}

// What `submit` answers with: the job, or the first line of what is watched.
void PrintSubmitted(Console& console, const v1::Job& job, bool watch) {
  if (!console.json) {
    console.out << job.id() << "  " << ShownState(job) << (job.reason().empty() ? "" : "  ")
                << Printable(job.reason()) << "\n"
                << std::flush;
  } else if (!watch) {
    console.out << RenderJson(job) << std::flush;
  } else if (IsTerminal(job.state())) {  // else the watch begins with it
    v1::WatchResponse message;
    *message.mutable_job() = job;
    console.out << RenderJsonLine(message) << std::flush;
  }
}

// The spec of a job file, its data path absolute.
absl::StatusOr<v1::JobSpec> ReadSpec(const SubmitOptions& options) {
  std::vector<std::string> overrides = options.overrides;
  if (options.priority) overrides.push_back(absl::StrCat("priority=", *options.priority));
  if (options.time_limit) {
    overrides.push_back(
        absl::StrCat("time_limit_seconds=", absl::ToInt64Seconds(*options.time_limit)));
  }
  absl::StatusOr<v1::JobSpec> spec = ReadJobSpecFile(options.path, overrides);
  if (!spec.ok()) {
    const bool invalid = absl::IsInvalidArgument(spec.status());
    return RpcError(invalid ? Reason::kJobFileInvalid : Reason::kJobFileUnreadable,
                    spec.status().message(), {{"file", options.path}});
  }
  std::error_code error;
  const std::filesystem::path data = std::filesystem::absolute(spec->data().path(), error);
  if (!error) spec->mutable_data()->set_path(data.lexically_normal().string());
  return spec;
}

}  // namespace

int Submit(Console& console, const SubmitOptions& options) {
  absl::StatusOr<v1::JobSpec> spec = ReadSpec(options);
  if (!spec.ok()) return Report(console, spec.status());
  for (const std::string& warning : JobSpecWarnings(*spec)) Warn(console, warning);
  v1::SubmitRequest request;
  request.set_request_id(options.request_id.empty() ? RandomNonce() : options.request_id);
  *request.mutable_spec() = *std::move(spec);
  request.set_hold(options.hold);
  absl::StatusOr<v1::Job> job = SubmitPersistently(console, request);
  if (job.ok()) job = AwaitPlan(console, *std::move(job));
  if (!job.ok()) return Report(console, job.status());
  PrintSubmitted(console, *job, options.watch);
  if (options.watch && !IsTerminal(job->state())) return WatchJob(console, job->id());
  return IsTerminal(job->state()) ? Outcome(console, *job) : kExitDone;
}

int List(Console& console, const ListOptions& options) {
  constexpr int kPageSize = 1000;
  v1::ListJobsRequest request;
  for (const v1::JobState state : options.states) request.add_states(state);
  request.set_id_prefix(options.name);
  if (options.since) request.set_submitted_from_unix_millis(absl::ToUnixMillis(*options.since));
  if (options.until) request.set_submitted_until_unix_millis(absl::ToUnixMillis(*options.until));
  v1::ListJobsResponse all;
  const int64_t limit = options.limit.value_or(std::numeric_limits<int64_t>::max());
  do {
    request.set_page_size(static_cast<int>(std::min<int64_t>(kPageSize, limit - all.jobs_size())));
    absl::StatusOr<v1::ListJobsResponse> page = console.coordinator.ListJobs(request);
    if (!page.ok()) return Report(console, page.status());
    all.mutable_jobs()->MergeFrom(page->jobs());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty() && all.jobs_size() < limit);
  console.out << (console.json ? RenderJson(all)
                               : RenderJobs({all.jobs().begin(), all.jobs().end()}, Now(console)));
  return kExitDone;
}

int Describe(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::Job> job = console.coordinator.GetJob(*id);
  if (!job.ok()) return Report(console, job.status());
  console.out << (console.json ? RenderJson(*job) : RenderJob(*job, Now(console)));
  return kExitDone;
}

int Cancel(Console& console, const std::string& text, std::optional<absl::Duration> grace) {
  return Change(console, text, [&](const std::string& id) {
    v1::CancelRequest request;
    request.set_id(id);
    if (grace) request.set_grace_millis(absl::ToInt64Milliseconds(*grace));
    return console.coordinator.Cancel(request);
  });
}

int Hold(Console& console, const std::string& text) {
  return Change(console, text, [&](const std::string& id) { return console.coordinator.Hold(id); });
}

int Release(Console& console, const std::string& text) {
  return Change(console, text,
                [&](const std::string& id) { return console.coordinator.Release(id); });
}

int Why(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::WhyResponse> why = console.coordinator.Why(*id);
  if (!why.ok()) return Report(console, why.status());
  console.out << (console.json ? RenderJson(*why) : RenderWhy(*why));
  return kExitDone;
}

int Wait(Console& console, const std::string& text, absl::Duration timeout) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  v1::Job job;
  const absl::Status followed =
      FollowJob(console, *id, timeout, [&](const v1::WatchResponse& message) {
        if (message.has_job()) job = message.job();
        return true;
      });
  if (HasReason(followed, Reason::kJobNotEnded)) {
    Report(console, RpcError(Reason::kJobNotEnded,
                             absl::StrCat(followed.message(), "; it is ", ShownState(job)),
                             {{"job", *id},
                              {"state", ShownState(job)},
                              {"timeout_seconds", absl::ToDoubleSeconds(timeout)}}));
    return kExitTimeout;
  }
  if (!followed.ok()) return Report(console, followed);
  console.out << JobAnswer(console, job) << std::flush;
  return Outcome(console, job);
}

int Watch(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  return id.ok() ? WatchJob(console, *id) : Report(console, id.status());
}

}  // namespace upipe::client
