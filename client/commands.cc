#include "client/commands.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/follow.h"
#include "client/live_view.h"
#include "client/render.h"
#include "common/ids.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"

namespace upipe::client {
namespace {

absl::Time Now(const Console& console) { return absl::FromUnixMillis(console.clock.UnixMillis()); }

int Report(Console& console, const absl::Status& status) {
  console.err << "upipe: " << status.message() << "\n";
  const bool wrong = absl::IsInvalidArgument(status) || absl::IsNotFound(status);
  return wrong ? kExitWrongRequest : kExitFailed;
}

// The exit code of a job that has ended, told on `err` unless it succeeded.
int Outcome(Console& console, const v1::Job& job) {
  if (job.state() == v1::JOB_STATE_SUCCEEDED) return kExitDone;
  if (job.state() == v1::JOB_STATE_CANCELLED) return kExitCancelled;
  console.err << "job " << job.id() << " " << ShownState(job) << ":\n"
              << RenderCause(job.cause(), 2);
  return kExitFailed;
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

int WatchJob(Console& console, const std::string& id) {
  LiveView view(console);
  const absl::Status followed =
      FollowJob(console, id, absl::InfiniteDuration(), [&](const v1::WatchResponse& message) {
        view.Show(message);
        return true;
      });
  view.Finish();
  return followed.ok() ? Outcome(console, view.job()) : Report(console, followed);
}

}  // namespace

int Submit(Console& console, const SubmitOptions& options) {
  if (options.watch && options.json) {
    console.err
        << "upipe: --watch shows progress as text and -o json prints one message: choose one\n";
    return kExitWrongRequest;
  }
  absl::StatusOr<v1::JobSpec> spec = ReadJobSpecFile(options.path, options.overrides);
  if (!spec.ok()) {
    console.err << spec.status().message() << "\n";
    return kExitWrongRequest;
  }
  std::error_code error;
  const std::filesystem::path data = std::filesystem::absolute(spec->data().path(), error);
  if (!error) spec->mutable_data()->set_path(data.lexically_normal().string());
  for (const std::string& warning : JobSpecWarnings(*spec))
    console.err << "warning: " << warning << "\n";

  v1::SubmitRequest request;
  request.set_request_id(options.request_id.empty() ? RandomNonce() : options.request_id);
  *request.mutable_spec() = *std::move(spec);
  absl::StatusOr<v1::Job> job = SubmitPersistently(console, request);
  if (job.ok()) job = AwaitPlan(console, *std::move(job));
  if (!job.ok()) return Report(console, job.status());
  if (options.json) {
    console.out << RenderJson(*job);
  } else {
    console.out << job->id() << "  " << ShownState(*job) << (job->reason().empty() ? "" : "  ")
                << Printable(job->reason()) << "\n"
                << std::flush;
  }
  if (options.watch && !IsTerminal(job->state())) return WatchJob(console, job->id());
  return IsTerminal(job->state()) ? Outcome(console, *job) : kExitDone;
}

int List(Console& console, bool json) {
  v1::ListJobsRequest request;
  v1::ListJobsResponse all;
  do {
    absl::StatusOr<v1::ListJobsResponse> page = console.coordinator.ListJobs(request);
    if (!page.ok()) return Report(console, page.status());
    all.mutable_jobs()->MergeFrom(page->jobs());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  console.out << (json ? RenderJson(all)
                       : RenderJobs({all.jobs().begin(), all.jobs().end()}, Now(console)));
  return kExitDone;
}

int Describe(Console& console, const std::string& text, bool json) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::Job> job = console.coordinator.GetJob(*id);
  if (!job.ok()) return Report(console, job.status());
  console.out << (json ? RenderJson(*job) : RenderJob(*job, Now(console)));
  return kExitDone;
}

int Cancel(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::Job> job = console.coordinator.Cancel(*id);
  if (!job.ok()) return Report(console, job.status());
  console.out << job->id() << "  " << ShownState(*job) << "\n";
  return kExitDone;
}

int Nodes(Console& console, bool json) {
  const absl::StatusOr<v1::ListNodesResponse> nodes = console.coordinator.ListNodes();
  if (!nodes.ok()) return Report(console, nodes.status());
  console.out << (json ? RenderJson(*nodes) : RenderNodes(*nodes));
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
  if (absl::IsDeadlineExceeded(followed)) {
    console.err << "upipe: " << followed.message() << "; it is " << ShownState(job) << "\n";
    return kExitTimeout;
  }
  if (!followed.ok()) return Report(console, followed);
  console.out << job.id() << "  " << ShownState(job) << "\n" << std::flush;
  return Outcome(console, job);
}

int Watch(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  return id.ok() ? WatchJob(console, *id) : Report(console, id.status());
}

}  // namespace upipe::client
