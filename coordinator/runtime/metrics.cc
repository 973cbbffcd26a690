#include "coordinator/runtime/metrics.h"

#include <google/protobuf/descriptor.h>

#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "coordinator/core/waiting.h"
#include "coordinator/runtime/straggler.h"

namespace upipe::coordinator {
namespace {

// Label of each kind of event, as Event lists them.
constexpr std::array<const char*, std::variant_size_v<Event>> kEventNames = {
    "submit",      "cancel",     "hold",        "release", "cordon", "uncordon",
    "drain",       "fence_node", "forget_node", "plan",    "hello",  "heartbeat",
    "rank_report", "progress",   "session_end", "tick"};

constexpr std::array kBudgets = {"infrastructure", "application", "none"};

std::string Label(absl::string_view name, absl::string_view prefix) {
  name.remove_prefix(prefix.size());
  return absl::AsciiStrToLower(name);
}
std::string LabelOf(v1::CauseKind cause) { return Label(v1::CauseKind_Name(cause), "CAUSE_KIND_"); }
std::string LabelOf(v1::WaitReason reason) {
  return reason == v1::WAIT_REASON_UNSPECIFIED ? "next"
                                               : Label(v1::WaitReason_Name(reason), "WAIT_REASON_");
}

// A counter that follows a count kept elsewhere.
void RaiseTo(prometheus::Counter& counter, double count) {
  counter.Increment(count - counter.Value());
}

// What `waits` has and `known` had not.
void Follow(prometheus::Histogram& histogram, const WaitCounts& waits, WaitCounts& known) {
  std::vector<double> more;
  for (size_t i = 0; i < waits.counts.size(); ++i) {
    more.push_back(static_cast<double>(waits.counts[i] - known.counts[i]));
  }
  histogram.ObserveMultiple(more, waits.seconds - known.seconds);
  known = waits;
}

// Where the services of the coordinator are declared.
std::vector<const google::protobuf::FileDescriptor*> ServiceFiles() {
  return {v1::SubmitRequest::descriptor()->file(), v1::ListNodesRequest::descriptor()->file(),
          v1::WorkerMessage::descriptor()->file()};
}

}  // namespace

Metrics::Metrics(const std::string& version) {
  const ServiceSeries& service = series_.service;
  service.build.At({version}).Set(1);
  for (const char* event : kEventNames) decisions_.push_back(&service.decisions.At({event}));
  service.commits.At();
  other_calls_ = CallsOf("unknown");
  for (const google::protobuf::FileDescriptor* file : ServiceFiles()) {
    for (int s = 0; s < file->service_count(); ++s) {
      const google::protobuf::ServiceDescriptor& declared = *file->service(s);
      for (int m = 0; m < declared.method_count(); ++m) {
        const std::string& method = declared.method(m)->name();
        calls_[absl::StrCat("/", declared.full_name(), "/", method)] =
            CallsOf(absl::StrCat(declared.name(), ".", method));
      }
    }
  }
  UpdateTally({});
  for (int kind = v1::CAUSE_KIND_OUT_OF_MEMORY; kind < v1::CauseKind_ARRAYSIZE; ++kind) {
    const std::string cause = LabelOf(static_cast<v1::CauseKind>(kind));
    for (const char* budget : kBudgets) series_.restart.restarts.At({cause, budget});
  }
}

Metrics::Calls Metrics::CallsOf(const std::string& label) const {
  Calls calls;
  for (int code = 0; code < kNumCodes; ++code) {
    const std::string name = absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
    calls.ended[code] = &series_.service.requests.At({label, absl::AsciiStrToLower(name)});
  }
  calls.seconds = &series_.service.seconds.At({label});
  return calls;
}

absl::StatusOr<std::unique_ptr<Metrics>> Metrics::Serve(const Options& options) {
  std::unique_ptr<Metrics> metrics(new Metrics(options.version));
  UPIPE_ASSIGN_OR_RETURN(metrics->address_, metrics->registry_.Serve(options.listen));
  return metrics;
}

void Metrics::Update(const State& state, Moment now) {
  UpdateCluster(state, now);
  UpdateQueue(state, now.boot);
  UpdateTally(state.tally);
  UpdateJobs(state);
  series_.service.revision.At().Set(static_cast<double>(state.revision));
  series_.service.epoch.At().Set(static_cast<double>(state.epoch));
}

void Metrics::ObserveStep(const Event& event, absl::Duration took) {
  decisions_[event.index()]->Observe(absl::ToDoubleSeconds(took));
}

void Metrics::ObserveCommit(absl::Duration took) {
  series_.service.commits.At().Observe(absl::ToDoubleSeconds(took));
}

void Metrics::ObserveCall(const std::string& method, absl::StatusCode code, absl::Duration took) {
  const auto known = calls_.find(method);
  const Calls& calls = known == calls_.end() ? other_calls_ : known->second;
  const int index = static_cast<int>(code);
  const int bounded = index >= 0 && index < kNumCodes ? index : 2;  // UNKNOWN
  calls.ended[bounded]->Increment();
  calls.seconds->Observe(absl::ToDoubleSeconds(took));
}

void Metrics::UpdateCluster(const State& state, Moment now) {
  const ClusterSeries& cluster = series_.cluster;
  std::map<v1::JobState, int64_t> jobs = state.num_ended;
  jobs[v1::JOB_STATE_PLANNING] = static_cast<int64_t>(state.unplanned.size());
  jobs[v1::JOB_STATE_QUEUED] = static_cast<int64_t>(state.queue.size());
  for (const std::string& id : state.active) ++jobs[state.jobs.at(id).record.state()];
  for (int s = v1::JOB_STATE_PLANNING; s < v1::JobState_ARRAYSIZE; ++s) {
    const auto of = static_cast<v1::JobState>(s);
    cluster.jobs.At({Label(v1::JobState_Name(of), "JOB_STATE_")})
        .Set(static_cast<double>(jobs[of]));
  }
  std::map<v1::NodeState, int64_t> nodes;
  int64_t cordoned = 0, free = 0, taken = 0, unknown = 0, unavailable = 0;
  std::map<std::string, GaugeGroup> workers;
  for (const auto& [worker, node] : state.nodes) {
    ++nodes[StateOf(state, node, now.boot)];
    cordoned += node.record.cordoned() ? 1 : 0;
    const bool offered = IsOffered(state, node, now.boot);
    for (const Slot& slot : node.slots) {
      const v1::SlotState of = StateOf(state, node, slot, now.boot);
      ++(of == v1::SLOT_STATE_BUSY              ? taken
         : of == v1::SLOT_STATE_UNKNOWN         ? unknown
         : of == v1::SLOT_STATE_FREE && offered ? free
                                                : unavailable);
    }
    if (node.session_number == 0) continue;  // it was not heard of yet
    GaugeGroup& gauges = workers[worker];
    if (const auto known = workers_.extract(worker)) gauges = std::move(known.mapped());
    gauges.Set(cluster.last_heard, {worker},
               static_cast<double>(now.unix_millis) / 1e3 -
                   absl::ToDoubleSeconds(now.boot - node.last_heard));
  }
  for (auto& [worker, gauges] : workers_) gauges.Clear();
  workers_ = std::move(workers);
  for (int s = v1::NODE_STATE_READY; s < v1::NodeState_ARRAYSIZE; ++s) {
    const auto of = static_cast<v1::NodeState>(s);
    cluster.nodes.At({Label(v1::NodeState_Name(of), "NODE_STATE_")})
        .Set(static_cast<double>(nodes[of]));
  }
  cluster.cordoned.At().Set(static_cast<double>(cordoned));
  for (const auto& [label, count] : {std::pair("free", free),
                                     {"taken", taken},
                                     {"unknown", unknown},
                                     {"unavailable", unavailable}}) {
    cluster.slots.At({label}).Set(static_cast<double>(count));
  }
}

void Metrics::UpdateQueue(const State& state, BootTime now) {
  std::map<v1::WaitReason, int64_t> lengths;
  std::map<Need, Fit> fits;
  for (const auto& [key, id] : state.queue) {
    const Job& job = state.jobs.at(id);
    const Need need = NeedOf(job);
    auto fit = fits.find(need);
    if (fit == fits.end()) fit = fits.emplace(need, FitOf(state, need, now)).first;
    ++lengths[WaitOf(state, job, fit->second, now).reason];
  }
  lengths[v1::WAIT_REASON_PLANNING] = static_cast<int64_t>(state.unplanned.size());
  const auto set = [&](v1::WaitReason reason) {
    series_.queue.length.At({LabelOf(reason)}).Set(static_cast<double>(lengths[reason]));
  };
  set(v1::WAIT_REASON_UNSPECIFIED);
  for (int r = v1::WAIT_REASON_PLANNING; r < v1::WaitReason_ARRAYSIZE; ++r) {
    set(static_cast<v1::WaitReason>(r));
  }
}

void Metrics::UpdateTally(const Tally& tally) {
  const RestartSeries& restart = series_.restart;
  for (const auto& [key, count] : tally.restarts) {
    const auto& [cause, budget] = key;
    RaiseTo(restart.restarts.At({LabelOf(cause), budget}), static_cast<double>(count));
  }
  RaiseTo(series_.cluster.stalls.At(), static_cast<double>(tally.stalls));
  RaiseTo(restart.commits.At(), static_cast<double>(tally.commits));
  RaiseTo(restart.problems.At(), static_cast<double>(tally.checkpoint_problems));
  RaiseTo(restart.lost_steps.At(), static_cast<double>(tally.lost_steps));
  RaiseTo(restart.attempt_seconds.At({"kept"}), tally.kept_seconds);
  RaiseTo(restart.attempt_seconds.At({"lost"}), tally.lost_seconds);
  Follow(series_.queue.wait.At(), tally.queue_waits, queue_waits_);
  Follow(restart.seconds.At(), tally.restart_waits, restart_waits_);
}

void Metrics::UpdateJobs(const State& state) {
  std::map<std::string, JobGauges> running;
  for (const std::string& id : state.active) {
    const Job& job = state.jobs.at(id);
    if (job.record.state() != v1::JOB_STATE_RUNNING) continue;
    JobGauges& gauges = running[id];
    if (const auto known = jobs_.extract(id)) gauges = std::move(known.mapped());
    if (gauges.generation != job.record.generation()) gauges.gauges.Clear();
    gauges.generation = job.record.generation();
    SetJob(id, job, gauges.gauges);
  }
  for (auto& [id, over] : jobs_) over.gauges.Clear();
  jobs_ = std::move(running);
}

void Metrics::SetJob(const std::string& id, const Job& job, GaugeGroup& gauges) {
  const JobSeries& series = series_.job;
  const v1::AttemptRecord& attempt = job.attempt->record;
  gauges.Set(series.ranks, {id}, attempt.ranks_size());
  gauges.Set(series.step, {id}, static_cast<double>(attempt.ranks(0).last_report().step()));
  if (job.record.has_last_commit()) {
    gauges.Set(series.checkpoint_step, {id}, static_cast<double>(job.record.last_commit().step()));
    gauges.Set(series.checkpoint_timestamp, {id},
               static_cast<double>(job.record.last_commit_unix_millis()) / 1e3);
  }
  if (const std::optional<OwnTimes> times = OwnTimesOf(job)) {
    gauges.Set(series.own_median, {id}, times->median_seconds);
    gauges.Set(series.own_max, {id}, times->max_seconds);
    gauges.Set(series.slowest_rank, {id}, times->slowest_rank);
  }
}

}  // namespace upipe::coordinator
