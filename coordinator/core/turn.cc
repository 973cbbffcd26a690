#include "coordinator/core/turn.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/utf8.h"
#include "coordinator/core/step.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxEvents = 64;
constexpr size_t kMaxEventBytes = 1000;
// Room in a batch for an attempt's step reports beside plan, job and request.
constexpr size_t kMaxAttemptBytes = 256 << 10;

// Frequent events free no slot and bring no worker; what they change, the next Tick sees.
bool IsFrequent(const Event& event) {
  const auto* reported = std::get_if<RankReported>(&event);
  return std::holds_alternative<HeartbeatReceived>(event) ||
         std::holds_alternative<ProgressReceived>(event) ||
         std::holds_alternative<SessionClosed>(event) ||
         (reported != nullptr && reported->report.state() < v1::RANK_STATE_EXITED);
}

// The record as it is stored: without per-peer counts, and with rank 0's report only when all would
// not fit.
v1::AttemptRecord Storable(const v1::AttemptRecord& record) {
  v1::AttemptRecord stored = record;
  for (v1::RankRecord& rank : *stored.mutable_ranks()) {
    if (rank.has_last_report()) rank.mutable_last_report()->clear_bytes_sent_to_peer();
  }
  if (stored.ByteSizeLong() > kMaxAttemptBytes) {
    for (int r = 1; r < stored.ranks_size(); ++r) stored.mutable_ranks(r)->clear_last_report();
  }
  return stored;
}

}  // namespace

Actions Step(State& state, const Event& event, Moment now) {
  Turn turn(state, now);
  std::visit([&](const auto& e) { turn.Handle(e); }, event);
  if (!IsFrequent(event)) turn.Schedule();
  return turn.Finish();
}

std::string AttemptKey(const std::string& job_id, int64_t generation) {
  return absl::StrCat("attempt/", job_id, "/", generation);
}

Actions Turn::Finish() {
  if (dirty_epoch_) SaveEpoch();
  for (const std::string& worker : dirty_nodes_) SaveNode(state_.nodes.at(worker));
  for (const std::string& id : dirty_jobs_) SaveJob(state_.jobs.at(id));
  SaveDrops();
  changed_jobs_.insert(dirty_jobs_.begin(), dirty_jobs_.end());
  const auto view = [this](const std::string& id) {
    return std::make_shared<const v1::Job>(*GetJob(state_, id));
  };
  for (const std::string& id : changed_jobs_) out_.actions.push_back(PublishJob{view(id)});
  for (const auto& [call, id] : replies_) out_.actions.push_back(ReplyJob{call, view(id)});
  return std::move(out_);
}

void Turn::SaveEpoch() {
  v1::EpochRecord epoch;
  epoch.set_epoch(state_.epoch);
  epoch.set_restored(state_.restored);
  out_.batches.push_back(
      Batch{{Write{"meta/epoch", epoch.SerializeAsString(), state_.epoch_revision}}});
  state_.epoch_revision = ++state_.revision;
}

void Turn::SaveDrops() {
  for (size_t begin = 0; begin < drops_.size(); begin += kMaxBatchWrites) {
    const size_t end = std::min(drops_.size(), begin + kMaxBatchWrites);
    out_.batches.push_back(Batch{{drops_.begin() + begin, drops_.begin() + end}});
    ++state_.revision;
  }
}

void Turn::SaveJob(Job& job) {
  const int64_t revision = ++state_.revision;
  const std::string& id = job.record.id();
  Batch batch;
  batch.writes.push_back({absl::StrCat("job/", id), job.record.SerializeAsString(), job.revision});
  job.revision = revision;
  if (job.request_unsaved) {
    v1::RequestRecord request;
    request.set_job_id(id);
    batch.writes.push_back(
        {absl::StrCat("request/", job.record.request_id()), request.SerializeAsString(), 0});
    job.request_unsaved = false;
  }
  if (job.plan_unsaved) {
    // A second plan takes the place of the first.
    const auto revision_before =
        job.record.has_measured() ? std::nullopt : std::optional<int64_t>(0);
    batch.writes.push_back(
        {absl::StrCat("plan/", id), job.plan->SerializeAsString(), revision_before});
    job.plan_unsaved = false;
  }
  if (job.attempt) {
    batch.writes.push_back({AttemptKey(id, job.attempt->record.generation()),
                            Storable(job.attempt->record).SerializeAsString(),
                            job.attempt->revision});
    job.attempt->revision = revision;
  }
  out_.batches.push_back(std::move(batch));
}

void Turn::SaveNode(Node& node) {
  const int64_t revision = ++state_.revision;
  out_.batches.push_back(Batch{{Write{absl::StrCat("node/", node.record.worker()),
                                      node.record.SerializeAsString(), node.revision}}});
  node.revision = revision;
}

void Turn::AddEvent(Job& job, absl::string_view kind, absl::string_view message) {
  if (job.record.events_size() >= kMaxEvents) {
    // The first event, QUEUED with the time of submission, is worth more than the second oldest.
    job.record.mutable_events()->DeleteSubrange(1, job.record.events_size() - kMaxEvents + 1);
  }
  v1::JobEvent& event = *job.record.add_events();
  event.set_unix_millis(now_.unix_millis);
  event.set_generation(job.record.generation());
  event.set_kind(std::string(kind));
  event.set_message(ToUtf8(message, kMaxEventBytes));
  Note(absl::StrCat("job ", job.record.id(), " ", kind, ": ", event.message()));
  Dirty(job);
}

void Turn::Send(const Node& node, v1::CoordinatorMessage message) {
  if (node.session == 0) return;
  out_.actions.push_back(SendToWorker{node.session, std::move(message)});
}

void Turn::Close(SessionId session, absl::Status why) {
  state_.worker_of_session.erase(session);
  out_.actions.push_back(CloseSession{session, std::move(why)});
}

void Turn::SetReason(Job& job, std::string reason) {
  if (job.reason == reason) return;
  job.reason = std::move(reason);
  changed_jobs_.insert(job.record.id());
}

}  // namespace upipe::coordinator
