#include "client/top.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/follow.h"
#include "client/render.h"
#include "client/report.h"
#include "client/top_view.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kEvery = absl::Seconds(2);
constexpr absl::Duration kOftenest = absl::Milliseconds(100);
constexpr absl::Duration kSeldomest = absl::Hours(1);
constexpr int kJobsLookedAt = 200;    // live ones
constexpr int kRunningLookedAt = 50;  // whole, each a call
constexpr int kEndedShown = 5;

// One look after the other, drawn over each other.
class Screen {
 public:
  explicit Screen(Console& console) : console_(console) {}

  // The last column and line stay free: a terminal that is written full wraps or scrolls.
  TerminalSize size() const {
    std::optional<TerminalSize> now;
    if (console_.terminal_size) now = console_.terminal_size();
    if (now) return {std::max<size_t>(now->columns, 2) - 1, std::max<size_t>(now->lines, 4) - 1};
    return {console_.terminal_width.value_or(121) - 1, 10'000};
  }

  void Draw(const std::vector<std::string>& lines) {
    std::string text = drawn_ == 0 ? "" : absl::StrCat("\x1b[", drawn_, "A\r");
    for (const std::string& line : lines) {
      absl::StrAppend(&text, line, console_.terminal_width ? "\x1b[K\n" : "\n");
    }
    if (drawn_ > 0) text += "\x1b[J";
    if (console_.terminal_width) drawn_ = lines.size();
    console_.out << text << std::flush;
  }

 private:
  Console& console_;
  size_t drawn_ = 0;  // lines
};

// What is looked at: the cluster.
class ClusterLook {
 public:
  absl::Status Refresh(Console& console) {
    UPIPE_ASSIGN_OR_RETURN(v1::ListNodesResponse nodes, console.coordinator.ListNodes());
    v1::ListJobsRequest live;
    live.set_page_size(kJobsLookedAt);
    for (const v1::JobState state :
         {v1::JOB_STATE_RUNNING, v1::JOB_STATE_STOPPING, v1::JOB_STATE_STARTING,
          v1::JOB_STATE_QUEUED, v1::JOB_STATE_PLANNING}) {
      live.add_states(state);
    }
    UPIPE_ASSIGN_OR_RETURN(v1::ListJobsResponse jobs, console.coordinator.ListJobs(live));
    v1::ListJobsRequest ended;
    ended.set_page_size(kEndedShown);
    for (const v1::JobState state :
         {v1::JOB_STATE_SUCCEEDED, v1::JOB_STATE_FAILED, v1::JOB_STATE_CANCELLED}) {
      ended.add_states(state);
    }
    UPIPE_ASSIGN_OR_RETURN(const v1::ListJobsResponse old, console.coordinator.ListJobs(ended));
    std::vector<v1::Job> shown(jobs.jobs().begin(), jobs.jobs().end());
    std::stable_sort(shown.begin(), shown.end(), [](const v1::Job& a, const v1::Job& b) {
      return IsRunning(a) && !IsRunning(b);
    });
    UPIPE_RETURN_IF_ERROR(Complete(console, shown));
    shown.insert(shown.end(), old.jobs().begin(), old.jobs().end());
    cluster_.nodes = std::move(nodes);
    cluster_.jobs = std::move(shown);
    return absl::OkStatus();
  }

  std::vector<std::string> Render(const std::string& notice, absl::Time now,
                                  TerminalSize size) const {
    return RenderTop(cluster_, notice, now, size);
  }
  bool over() const { return false; }

 private:
  static bool IsRunning(const v1::Job& job) {
    return job.state() == v1::JOB_STATE_RUNNING || job.state() == v1::JOB_STATE_STOPPING;
  }

  // Positions, plans and memory of the jobs that run, which a list leaves out.
  absl::Status Complete(Console& console, std::vector<v1::Job>& jobs) {
    std::map<std::string, Progress> paces;
    int looked_at = 0;
    for (v1::Job& job : jobs) {
      if (!IsRunning(job) || ++looked_at > kRunningLookedAt) continue;
      absl::StatusOr<v1::Job> whole = console.coordinator.GetJob(job.id());
      if (absl::IsNotFound(whole.status())) continue;
      UPIPE_RETURN_IF_ERROR(whole.status());
      job = *std::move(whole);
      Progress& pace = paces[job.id()] = cluster_.paces[job.id()];
      pace.Take(job);
    }
    cluster_.paces = std::move(paces);
    return absl::OkStatus();
  }

  TopCluster cluster_;
};

// What is looked at: one job.
class JobLook {
 public:
  explicit JobLook(std::string name) : name_(std::move(name)) {}

  absl::Status Refresh(Console& console) {
    if (id_.empty()) {
      UPIPE_ASSIGN_OR_RETURN(id_, ResolveJob(console, name_));
    }
    UPIPE_ASSIGN_OR_RETURN(job_, console.coordinator.GetJob(id_));
    pace_.Take(job_);
    return absl::OkStatus();
  }
  std::vector<std::string> Render(const std::string& notice, absl::Time now,
                                  TerminalSize size) const {
    return RenderTopJob(job_, pace_, notice, now, size);
  }
  bool over() const { return IsTerminal(job_.state()); }

 private:
  const std::string name_;
  std::string id_;
  v1::Job job_;
  Progress pace_;
};

template <typename Look>
int Show(Console& console, Look look, bool once, absl::Duration every) {
  Screen screen(console);
  bool seen = false;
  BootTime answered = console.clock.Now();
  for (;;) {
    const absl::Status status = look.Refresh(console);
    const absl::Duration silent = console.clock.Now() - answered;
    if (status.ok()) {
      seen = true;
      answered = console.clock.Now();
    } else if (!IsOutage(status) || once || (!seen && silent >= kFirstContactLimit)) {
      return Report(console, status);
    }
    const std::string notice = status.ok()
                                   ? ""
                                   : absl::StrCat("** no answer for ", FormatTimeSpan(silent),
                                                  ", trying again: ", status.message());
    if (seen) {
      screen.Draw(
          look.Render(notice, absl::FromUnixMillis(console.clock.UnixMillis()), screen.size()));
    }
    if (status.ok() && (once || look.over())) return kExitDone;
    console.pause(every);
  }
}

}  // namespace

int Top(Console& console, const TopOptions& options) {
  const bool once = options.once || !console.terminal_width.has_value();
  const absl::Duration every = std::clamp(options.every.value_or(kEvery), kOftenest, kSeldomest);
  return options.job.empty() ? Show(console, ClusterLook(), once, every)
                             : Show(console, JobLook(options.job), once, every);
}

}  // namespace upipe::client
