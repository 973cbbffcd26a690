#include "tests/sim/system/clients.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/sim/system/cluster.h"
#include "tests/sim/system/observer.h"

namespace upipe::sim {

using coordinator::CallId;
using coordinator::Event;

Clients::Clients(Cluster& cluster) : cluster_(cluster), world_(cluster.world()) {}

void Clients::Begin() {
  world_.After(world_.Millis(100, 600), [this] { SubmitNow(); });
  world_.After(world_.Millis(1000, 3000), [this] { ActOnJob(); });
  world_.After(world_.Millis(2000, 5000), [this] { ActOnWorker(); });
  world_.After(absl::Seconds(1), [this] { CleanUp(); });
}

v1::JobSpec Clients::NewSpec() {
  v1::JobSpec spec;
  spec.set_name(world_.Chance(3) ? "refused" : "job");
  spec.mutable_parallel()->set_ranks(1 + static_cast<int>(world_.Random(4)));
  spec.mutable_train()->set_steps(world_.Chance(10) ? 1 : 8 + static_cast<int>(world_.Random(30)));
  v1::CheckpointSpec& checkpoint = *spec.mutable_checkpoint();
  if (world_.Chance(70)) checkpoint.set_path("/checkpoints");
  checkpoint.set_every_steps(2 + static_cast<int>(world_.Random(6)));
  checkpoint.set_keep(1 + static_cast<int>(world_.Random(3)));
  v1::RestartSpec& restarts = *spec.mutable_restarts();
  restarts.set_infrastructure(world_.Chance(20) ? static_cast<int>(world_.Random(2)) : 20);
  restarts.set_application(static_cast<int>(world_.Random(4)));
  restarts.set_no_progress(1 + static_cast<int>(world_.Random(5)));
  spec.set_priority(world_.Chance(30) ? static_cast<int>(world_.Random(3)) - 1 : 0);
  if (world_.Chance(6)) spec.set_time_limit_seconds(1 + static_cast<int>(world_.Random(6)));
  return spec;
}

void Clients::SubmitNow() {
  if (!world_.faults()) return;
  world_.After(world_.Millis(200, 2600), [this] { SubmitNow(); });
  Submit(absl::StrCat("request", ++requests_), NewSpec(), world_.Chance(8));
}

// Again and again under one request id, until an answer comes.
void Clients::Submit(const std::string& request_id, const v1::JobSpec& spec, bool hold) {
  unanswered_.insert(request_id);
  const std::string job_id = absl::StrCat("job", ++ids_);
  cluster_.Call(
      [=](CallId call) -> Event {
        return coordinator::SubmitReceived{call, job_id, request_id, spec, hold};
      },
      [this, request_id](const absl::StatusOr<std::shared_ptr<const v1::Job>>& job) {
        unanswered_.erase(request_id);
        if (job.ok()) cluster_.observer().OnSubmitted(request_id, (*job)->id());
      });
  world_.After(world_.Millis(400, 3000), [=, this] {
    if (unanswered_.contains(request_id)) {
      Submit(request_id, spec, hold);
    } else if (world_.Mishap(6)) {
      Submit(request_id, spec, hold);  // an answer it has forgotten
    }
  });
}

bool Clients::waiting() const {
  if (!unanswered_.empty()) return true;
  for (const auto& [key, id] : cluster_.state().queue) {
    if (cluster_.state().jobs.at(id).record.held()) return true;
  }
  return false;
}

std::optional<std::string> Clients::AnyJob(bool unended) {
  if (!cluster_.up()) return std::nullopt;
  std::vector<std::string> ids;
  for (const auto& [id, job] : cluster_.state().jobs) {
    if (!unended || !coordinator::IsTerminal(job.record.state())) ids.push_back(id);
  }
  if (ids.empty()) return std::nullopt;
  return ids[world_.Random(ids.size())];
}

void Clients::ActOnJob() {
  if (!world_.faults()) return;
  world_.After(world_.Millis(300, 4000), [this] { ActOnJob(); });
  const std::optional<std::string> id = AnyJob(world_.Chance(90));
  if (!id) return;
  const uint64_t what = world_.Random(10);
  if (what < 4) {
    std::optional<absl::Duration> grace;
    if (world_.Chance(60))
      grace = world_.Chance(40) ? absl::ZeroDuration() : world_.Millis(1, 1500);
    return cluster_.Call([id, grace](CallId call) -> Event {
      return coordinator::CancelReceived{call, *id, grace};
    });
  }
  if (what < 7) {
    return cluster_.Call([id](CallId call) -> Event {
      return coordinator::HoldReceived{call, *id};
    });
  }
  cluster_.Call([id](CallId call) -> Event { return coordinator::ReleaseReceived{call, *id}; });
}

void Clients::ActOnWorker() {
  if (!world_.faults()) return;
  world_.After(world_.Millis(500, 4000), [this] { ActOnWorker(); });
  const auto& worker = cluster_.workers()[world_.Random(cluster_.workers().size())];
  const std::string name = worker->name();
  // An operator gives the word for a machine only after looking at it.
  if (!worker->powered()) {
    return cluster_.Call([name](CallId call) -> Event {
      return coordinator::FenceNodeReceived{call, name};
    });
  }
  switch (world_.Random(8)) {
    case 0:
    case 1:
      return cluster_.Call([name](CallId call) -> Event {
        return coordinator::CordonReceived{call, name, "by hand"};
      });
    case 2: {
      std::optional<absl::Duration> grace;
      if (world_.Chance(50)) grace = world_.Millis(0, 2000);
      return cluster_.Call([name, grace](CallId call) -> Event {
        return coordinator::DrainReceived{call, name, "by hand", grace};
      });
    }
    case 3:
      return cluster_.Call([name](CallId call) -> Event {
        return coordinator::ForgetNodeReceived{call, name};
      });
    default:
      return cluster_.Call([name](CallId call) -> Event {
        return coordinator::UncordonReceived{call, name};
      });
  }
}

// Whatever was held or cordoned is set free once faults are over.
void Clients::CleanUp() {
  world_.After(absl::Seconds(1), [this] { CleanUp(); });
  if (world_.faults() || !cluster_.up()) return;
  for (const auto& [name, node] : cluster_.state().nodes) {
    if (!node.record.cordoned()) continue;
    cluster_.Call([name = name](CallId call) -> Event {
      return coordinator::UncordonReceived{call, name};
    });
  }
  for (const auto& [id, job] : cluster_.state().jobs) {
    if (!job.record.held() || coordinator::IsTerminal(job.record.state())) continue;
    cluster_.Call([id = id](CallId call) -> Event {
      return coordinator::ReleaseReceived{call, id};
    });
  }
}

}  // namespace upipe::sim
