#include "coordinator/core/state.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::coordinator {
namespace {

template <typename Message>
absl::StatusOr<Message> Parse(const Entry& entry) {
  Message message;
  if (!message.ParseFromString(entry.value)) {
    return absl::DataLossError(absl::StrCat("store record ", entry.key, " of ", entry.value.size(),
                                            " bytes does not parse"));
  }
  return message;
}

absl::Status LoadNodes(Store& store, State& state, BootTime now) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> entries, store.List("node/"));
  for (const Entry& entry : entries) {
    UPIPE_ASSIGN_OR_RETURN(v1::NodeRecord record, Parse<v1::NodeRecord>(entry));
    Node& node = state.nodes[record.worker()];
    node.slots.resize(record.num_slots());
    node.record = std::move(record);
    node.revision = entry.revision;
    node.last_heard = now;
  }
  return absl::OkStatus();
}

// A back-off goes on where it was; the wall clock is believed no further than its longest.
BootTime RetryAt(const v1::JobRecord& record, const Timing& timing, Moment now) {
  const absl::Duration left = absl::Milliseconds(record.retry_at_unix_millis() - now.unix_millis);
  return now.boot + std::clamp(left, absl::ZeroDuration(), timing.backoff_longest);
}

// A grace goes on where it was; the wall clock makes it no longer than it was given.
absl::Duration GraceLeft(const v1::AttemptRecord& record, Moment now) {
  const absl::Duration left = absl::Milliseconds(record.kill_at_unix_millis() - now.unix_millis);
  return std::clamp(left, absl::ZeroDuration(), absl::Milliseconds(record.grace_millis()));
}

void Index(const v1::JobRecord& record, State& state) {
  if (record.state() == v1::JOB_STATE_PLANNING) {
    state.unplanned[KeyOf(record)] = record.id();
  } else if (record.state() == v1::JOB_STATE_QUEUED) {
    state.queue[KeyOf(record)] = record.id();
  } else if (IsTerminal(record.state())) {
    ListEnded(state, record);
  } else {
    state.active.insert(record.id());
  }
}

absl::Status LoadJobs(Store& store, State& state, Moment now) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> jobs, store.List("job/"));
  for (const Entry& entry : jobs) {
    UPIPE_ASSIGN_OR_RETURN(v1::JobRecord record, Parse<v1::JobRecord>(entry));
    const int64_t number = record.submit_number();
    state.next_submit_number = std::max(state.next_submit_number, number + 1);
    state.job_of_request[record.request_id()] = record.id();
    Index(record, state);
    Job& job = state.jobs[record.id()];
    job.retry_at = RetryAt(record, state.timing, now);
    job.record = std::move(record);
    job.revision = entry.revision;
    job.known_since = now.boot;
  }
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> plans, store.List("plan/"));
  for (const Entry& entry : plans) {
    const auto job = state.jobs.find(entry.key.substr(5));
    if (job == state.jobs.end()) {
      return absl::DataLossError(absl::StrCat("store record ", entry.key, " has no job"));
    }
    UPIPE_ASSIGN_OR_RETURN(v1::RunPlan plan, Parse<v1::RunPlan>(entry));
    job->second.plan = std::make_shared<const v1::RunPlan>(std::move(plan));
  }
  return absl::OkStatus();
}

absl::Status LoadAttempts(Store& store, State& state, Moment now) {
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> entries, store.List("attempt/"));
  for (const Entry& entry : entries) {
    UPIPE_ASSIGN_OR_RETURN(v1::AttemptRecord record, Parse<v1::AttemptRecord>(entry));
    const auto found = state.jobs.find(record.job_id());
    if (found == state.jobs.end()) {
      return absl::DataLossError(absl::StrCat("store record ", entry.key, " has no job"));
    }
    for (int rank = 0; rank < record.ranks_size(); ++rank) {
      const v1::RankRecord& placed = record.ranks(rank);
      const auto node = state.nodes.find(placed.worker());
      if (!HoldsSlot(placed) || node == state.nodes.end()) continue;
      if (placed.slot() >= static_cast<int>(node->second.slots.size())) continue;
      node->second.slots[placed.slot()].holder =
          SlotHolder{record.job_id(), record.generation(), record.nonce(), rank};
    }
    Job& job = found->second;
    if (record.generation() != job.record.generation()) {
      const int64_t generation = record.generation();
      job.earlier[generation] = {std::move(record), entry.revision};
      continue;
    }
    Attempt& attempt = job.attempt.emplace();
    const absl::Duration age = absl::Milliseconds(now.unix_millis - record.placed_unix_millis());
    attempt.placed_at = now.boot + -std::clamp(age, absl::ZeroDuration(), absl::Hours(24 * 3650));
    attempt.soft.resize(record.ranks_size());
    attempt.record = std::move(record);
    attempt.revision = entry.revision;
    attempt.last_launch = now.boot;
    attempt.counted_until = now.boot;
    attempt.kill_at = now.boot + GraceLeft(attempt.record, now);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<State> LoadState(Store& store, const LoadOptions& options, Moment now,
                                Actions* actions) {
  State state;
  state.timing = options.timing;
  state.retention = options.retention;
  state.new_nonce = options.new_nonce;
  state.revision = store.Revision();
  state.last_node_joined = now.boot;
  state.next_resend = now.boot;
  int64_t epoch_revision = 0;
  UPIPE_ASSIGN_OR_RETURN(const std::vector<Entry> epochs, store.List("meta/epoch"));
  if (!epochs.empty()) {
    UPIPE_ASSIGN_OR_RETURN(const v1::EpochRecord last, Parse<v1::EpochRecord>(epochs.front()));
    state.epoch = last.epoch();
    state.restored = last.restored();
    epoch_revision = epochs.front().revision;
  }
  v1::EpochRecord epoch;
  epoch.set_epoch(++state.epoch);
  epoch.set_restored(state.restored);
  actions->batches.push_back(
      Batch{{Write{"meta/epoch", epoch.SerializeAsString(), epoch_revision}}});
  state.epoch_revision = ++state.revision;
  UPIPE_RETURN_IF_ERROR(LoadNodes(store, state, now.boot));
  UPIPE_RETURN_IF_ERROR(LoadJobs(store, state, now));
  UPIPE_RETURN_IF_ERROR(LoadAttempts(store, state, now));
  return state;
}

bool IsTerminal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

void ListEnded(State& state, const v1::JobRecord& job) {
  state.ended.emplace(job.ended_unix_millis(), job.id());
  ++state.num_ended[job.state()];
}

void UnlistEnded(State& state, const v1::JobRecord& job) {
  state.ended.erase({job.ended_unix_millis(), job.id()});
  --state.num_ended[job.state()];
}

bool HoldsSlot(const v1::RankRecord& rank) {
  return rank.state() != v1::RANK_STATE_GONE && !rank.forgotten();
}

bool IsFinished(const v1::RankRecord& rank) {
  return rank.state() >= v1::RANK_STATE_EXITED && rank.has_exit_code() && rank.exit_code() == 0 &&
         !rank.has_signal() && !rank.left_early();
}

v1::NodeState StateOf(const State& state, const Node& node, BootTime now) {
  if (node.lost) return v1::NODE_STATE_LOST;
  if (!node.greeted) return v1::NODE_STATE_UNKNOWN;
  if (node.session == 0 || now - node.last_heard >= state.timing.SuspectAfter()) {
    return v1::NODE_STATE_SUSPECT;
  }
  return v1::NODE_STATE_READY;
}

v1::SlotState StateOf(const State& state, const Node& node, const Slot& slot, BootTime now) {
  if (StateOf(state, node, now) != v1::NODE_STATE_READY) return v1::SLOT_STATE_UNKNOWN;
  if (!slot.holder) return slot.device.sick().empty() ? v1::SLOT_STATE_FREE : v1::SLOT_STATE_SICK;
  if (slot.holder->quarantined) return v1::SLOT_STATE_QUARANTINED;
  return v1::SLOT_STATE_BUSY;
}

bool IsOfBackend(const Node& node, const v1::JobSpec& spec) {
  return (node.record.backend() == "cuda") == (spec.parallel().backend() == "cuda");
}

int64_t NumKnownSlots(const State& state, const v1::JobSpec& spec) {
  int64_t slots = 0;
  for (const auto& [worker, node] : state.nodes) {
    if (IsOfBackend(node, spec)) slots += node.record.num_slots();
  }
  return slots;
}

std::optional<int64_t> OfferedBytesPerRank(const State& state, const v1::JobSpec& spec) {
  int64_t ranks = spec.parallel().ranks();
  std::vector<std::pair<int64_t, int64_t>> offers;  // bytes, slots
  for (const auto& [worker, node] : state.nodes) {
    if (!IsOfBackend(node, spec)) continue;
    offers.emplace_back(node.record.memory_per_rank_bytes(), node.record.num_slots());
  }
  std::sort(offers.rbegin(), offers.rend());
  for (const auto& [bytes, slots] : offers) {
    ranks -= slots;
    if (ranks <= 0) return bytes;
  }
  return std::nullopt;
}

}  // namespace upipe::coordinator
