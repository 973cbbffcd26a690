#include "worker/agent/reporting.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::worker {
namespace {

constexpr absl::Duration kBackoffMin = absl::Milliseconds(50);
constexpr absl::Duration kBackoffMax = absl::Seconds(5);
constexpr int kSilentHeartbeats = 5;  // a session without a word for this long is given up

constexpr size_t kUnacknowledgedMax = 4096;

// Bounds what a coordinator that never acknowledges makes us remember.
template <typename Map>
void DropOldest(Map& by_sequence) {
  if (by_sequence.size() > kUnacknowledgedMax) by_sequence.erase(by_sequence.begin());
}

uint64_t Send(State& state, v1::WorkerMessage message, Actions& out) {
  const uint64_t sequence = state.next_sequence++;
  message.set_sequence(sequence);
  out.push_back(SendToCoordinator{std::move(message)});
  return sequence;
}

void SetIfPositive(int64_t millis, absl::Duration& duration) {
  if (millis > 0) duration = absl::Milliseconds(millis);
}

void AbandonSession(State& state, BootTime now, const std::string& why, Actions& out) {
  out.push_back(NodeEvent{why});
  out.push_back(CloseSession{why});
  LoseSession(state, now);
}

void Greet(State& state, BootTime now, Actions& out) {
  state.phase = SessionPhase::kGreeting;
  state.next_sequence = 1;
  state.heartbeats.clear();
  state.reports.clear();
  state.greeted_at = now;
  state.heard_at = now;
  v1::WorkerMessage message;
  v1::Hello& hello = *message.mutable_hello();
  hello = state.identity;
  hello.set_session_number(static_cast<int64_t>(state.session));
  hello.set_epoch(state.epoch);
  hello.set_leaving(state.left_at.has_value());
  hello.mutable_newest_generations()->insert(state.newest_generation.begin(),
                                             state.newest_generation.end());
  for (auto& [key, rank] : state.ranks) {
    rank.acknowledged = false;
    rank.resend_at.reset();
    *hello.add_ranks() = rank.report;
  }
  Send(state, std::move(message), out);
}

v1::Heartbeat HeartbeatOf(const State& state) {
  v1::Heartbeat heartbeat;
  heartbeat.set_leaving(state.left_at.has_value());
  *heartbeat.mutable_devices() = state.identity.devices();
  v1::AttemptPositions* attempt = nullptr;
  for (const auto& [key, rank] : state.ranks) {  // by nonce, then rank
    if (!IsLive(rank) || !rank.position_read_at.has_value()) continue;
    if (attempt == nullptr || attempt->fence().nonce() != key.nonce) {
      attempt = heartbeat.add_attempts();
      *attempt->mutable_fence() = rank.report.ref().fence();
      attempt->mutable_fence()->clear_epoch();
    }
    v1::RankPosition& position = *attempt->add_ranks();
    position = rank.position;
    position.set_seconds_in_place(absl::ToDoubleSeconds(rank.in_place));
  }
  return heartbeat;
}

}  // namespace

bool IsLive(const Rank& rank) {
  return rank.launched && rank.report.state() < v1::RANK_STATE_EXITED;
}

SlotCounts CountSlots(const State& state) {
  std::map<int, bool> held;  // slot -> quarantined
  for (const auto& [key, rank] : state.ranks) {
    if (rank.report.state() == v1::RANK_STATE_GONE) continue;
    held[rank.report.slot()] |= rank.report.quarantined();
  }
  SlotCounts counts;
  for (int slot = 0; slot < state.identity.num_slots(); ++slot) {
    const auto holder = held.find(slot);
    const bool sick =
        slot < state.identity.devices_size() && !state.identity.devices(slot).sick().empty();
    ++(holder == held.end() ? (sick ? counts.sick : counts.free)
       : holder->second     ? counts.quarantined
                            : counts.taken);
  }
  return counts;
}

BootTime SilentWhileLeavingAt(const State& state) {
  const BootTime since = std::max(*state.left_at, state.last_acknowledged.value_or(*state.left_at));
  return since + std::max(state.timing.kill_bound, state.timing.heartbeat * kSilentHeartbeats);
}

void Changed(Rank& rank) {
  ++rank.version;
  rank.acknowledged = false;
  rank.resend_at.reset();
}

void LoseSession(State& state, BootTime now) {
  state.phase = SessionPhase::kClosed;
  state.heartbeats.clear();
  state.reports.clear();
  state.backoff = std::min({std::max(state.backoff * 2, kBackoffMin), kBackoffMax,
                            state.timing.heartbeat * 2});  // a short heartbeat goes below the least
  state.reconnect_at = now + state.backoff;
}

void AcceptHelloAck(State& state, const v1::HelloAck& ack, BootTime now, Actions& out) {
  if (ack.epoch() < state.epoch) {
    return AbandonSession(state, now,
                          absl::StrCat("refused coordinator epoch ", ack.epoch(), ": epoch ",
                                       state.epoch, " has spoken to this worker"),
                          out);
  }
  state.epoch = ack.epoch();
  SetIfPositive(ack.timing().heartbeat_millis(), state.timing.heartbeat);
  SetIfPositive(ack.timing().kill_bound_millis(), state.timing.kill_bound);
  SetIfPositive(ack.timing().autonomy_millis(), state.timing.autonomy);
  if (state.phase != SessionPhase::kGreeting) return;
  state.phase = SessionPhase::kOpen;
  state.backoff = absl::ZeroDuration();
  state.told_refusal.clear();
  state.last_acknowledged = state.greeted_at;
  state.autonomous = false;
  state.next_heartbeat = now + state.timing.heartbeat;
  out.push_back(NodeEvent{absl::StrCat("session open with coordinator epoch ", ack.epoch())});
}

void AcceptHeartbeatAck(State& state, uint64_t sequence) {
  const auto sent = state.heartbeats.find(sequence);
  if (sent == state.heartbeats.end()) return;
  state.last_acknowledged = std::max(*state.last_acknowledged, sent->second);
  state.autonomous = false;
  state.heartbeats.erase(state.heartbeats.begin(), std::next(sent));
}

void AcceptRankAck(State& state, uint64_t sequence) {
  const auto sent = state.reports.find(sequence);
  if (sent == state.reports.end()) return;
  const auto [key, version] = sent->second;
  state.reports.erase(sent);
  const auto found = state.ranks.find(key);
  if (found == state.ranks.end() || found->second.version != version) return;
  found->second.acknowledged = true;
  std::erase_if(state.reports,
                [&key = key](const auto& entry) { return entry.second.first == key; });
  if (found->second.report.state() != v1::RANK_STATE_GONE) return;
  state.connections.erase(found->second.connection);  // the stream of a process proven gone
  state.ranks.erase(found);
}

void KeepSession(State& state, BootTime now, Actions& out) {
  if (state.phase == SessionPhase::kClosed) {
    if (now < state.reconnect_at) return;
    out.push_back(OpenSession{++state.session});
    return Greet(state, now, out);
  }
  const absl::Duration patience =
      std::max(state.timing.heartbeat * kSilentHeartbeats, absl::Seconds(1));
  if (now >= state.heard_at + patience) {
    return AbandonSession(
        state, now, absl::StrCat("the coordinator was silent for ", absl::FormatDuration(patience)),
        out);
  }
  if (state.phase != SessionPhase::kOpen || now < state.next_heartbeat) return;
  v1::WorkerMessage message;
  *message.mutable_heartbeat() = HeartbeatOf(state);
  const uint64_t sequence = Send(state, std::move(message), out);
  state.heartbeats[sequence] = now;
  DropOldest(state.heartbeats);
  state.next_heartbeat = now + state.timing.heartbeat;
}

void FlushReports(State& state, BootTime now, Actions& out) {
  if (state.phase != SessionPhase::kOpen) return;
  for (auto& [key, rank] : state.ranks) {
    if (rank.acknowledged || (rank.resend_at.has_value() && now < *rank.resend_at)) continue;
    v1::WorkerMessage message;
    *message.mutable_rank() = rank.report;
    const uint64_t sequence = Send(state, std::move(message), out);
    state.reports[sequence] = {key, rank.version};
    DropOldest(state.reports);
    rank.resend_at = now + state.timing.heartbeat;
  }
}

void SendProgress(State& state, const Rank& rank, const v1::StepReport& report, Actions& out) {
  if (state.phase != SessionPhase::kOpen) return;
  v1::WorkerMessage message;
  *message.mutable_progress()->mutable_ref() = rank.report.ref();
  *message.mutable_progress()->mutable_report() = report;
  Send(state, std::move(message), out);
}

}  // namespace upipe::worker
