#include "worker/agent/agent.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "worker/agent/cause.h"
#include "worker/agent/reporting.h"

namespace upipe::worker {
namespace {

constexpr absl::Duration kDetachGrace =
    absl::Milliseconds(500);  // between a closed stream and the kill

bool IsGone(const Rank& rank) { return rank.report.state() == v1::RANK_STATE_GONE; }
bool IsEnded(const Rank& rank) { return rank.report.state() >= v1::RANK_STATE_EXITED; }
const v1::Fence& FenceOf(const Rank& rank) { return rank.report.ref().fence(); }

// Names become path parts, cgroup names and journal words.
bool IsPlainName(const std::string& name) {
  return !name.empty() && name.size() <= 128 && name[0] != '.' &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(c) || c == '-' || c == '_' || c == '.';
         });
}

// Handles one event; everything it decides goes to `out`.
class Decision {
 public:
  Decision(State& state, BootTime now, Actions& out) : s_(state), now_(now), out_(out) {}

  void EnforceAutonomy();
  void RunTimers();
  void Finish();

  void On(const SessionClosed& event);
  void On(const FromCoordinator& event);
  void On(const FromTrainer& event);
  void On(const TrainerClosed& event);
  void On(const ProcessStarted& event);
  void On(const ProcessLaunchFailed& event);
  void On(const ProcessExited& event);
  void On(const ProcessGone& event);
  void On(const Tick&) {}
  void On(const Shutdown& event);

 private:
  bool Accepts(const v1::Fence& fence);
  void Start(const v1::StartRank& start);
  std::string RefusalOf(const v1::StartRank& start) const;
  void Supersede(const v1::Fence& fence);
  void LaunchWaiting();
  void Stop(const v1::StopRanks& stop);
  void Introduce(const v1::Peers& peers);
  void Kill(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
            int64_t fence = 0);
  void KillSiblings(const RankKey& failed, const v1::Cause& cause);
  void EndWithoutProcess(Rank& rank, v1::CauseKind kind, const std::string& why);
  void Attach(uint64_t connection, const v1::TrainerHello& hello);
  void Assign(Rank& rank);
  void SetState(Rank& rank, v1::RankState rank_state);
  void Reject(uint64_t connection, const std::string& why);
  void Tell(const std::string& text) { out_.push_back(NodeEvent{text}); }
  std::string Name(const Rank& rank) const {
    return absl::StrCat("rank ", rank.report.ref().rank(), " of ", FenceOf(rank).job_id(),
                        " generation ", FenceOf(rank).generation());
  }

  State& s_;
  const BootTime now_;
  Actions& out_;
};

void Decision::SetState(Rank& rank, v1::RankState rank_state) {
  rank.report.set_state(rank_state);
  Changed(rank);
}

void Decision::EndWithoutProcess(Rank& rank, v1::CauseKind kind, const std::string& why) {
  v1::Cause& cause = *rank.report.mutable_cause();
  cause.set_kind(kind);
  cause.set_message(why);
  cause.set_rank(rank.report.ref().rank());
  cause.set_node(s_.identity.worker());
  rank.gone_until.reset();
  SetState(rank, v1::RANK_STATE_GONE);
}

void Decision::Kill(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
                    int64_t fence) {
  if (IsEnded(rank) || rank.kill_sent) return;
  if (!rank.launched) return EndWithoutProcess(rank, kind, why);
  rank.kill_sent = true;
  if (rank.kill_cause.message().empty()) {
    rank.kill_cause.set_kind(kind);
    rank.kill_cause.set_message(why);
    rank.kill_cause.set_node(s_.identity.worker());
  }
  if (!rank.gone_until.has_value()) rank.gone_until = now_ + s_.timing.kill_bound;
  out_.push_back(KillRank{key, FenceOf(rank).job_id(), fence});
}

void Decision::EnforceAutonomy() {
  if (s_.autonomous || !s_.last_acknowledged.has_value()) return;
  if (now_ < *s_.last_acknowledged + s_.timing.autonomy) return;
  s_.autonomous = true;
  const std::string why = absl::StrCat(
      "no heartbeat was acknowledged for ", absl::FormatDuration(now_ - *s_.last_acknowledged),
      ", the worker may act alone for ", absl::FormatDuration(s_.timing.autonomy));
  Tell(absl::StrCat("the coordinator is away: ", why, "; killing every rank"));
  for (auto& [key, rank] : s_.ranks) Kill(key, rank, v1::CAUSE_KIND_NODE_LOST, why);
}

void Decision::RunTimers() {
  for (auto& [key, rank] : s_.ranks) {
    if (rank.grace_until.has_value() && now_ >= *rank.grace_until) {
      rank.grace_until.reset();
      Kill(key, rank, rank.kill_cause.kind(), "did not end within the grace");
    }
    if (rank.detached_until.has_value() && now_ >= *rank.detached_until) {
      rank.detached_until.reset();
      Kill(key, rank, v1::CAUSE_KIND_INTERNAL,
           "closed its stream to the worker and went on running");
    }
    if (rank.gone_until.has_value() && now_ >= *rank.gone_until) {
      rank.gone_until.reset();
      rank.report.set_quarantined(true);
      Changed(rank);
      Tell(absl::StrCat("slot ", rank.report.slot(), " is quarantined: ", Name(rank),
                        " was not proven gone within ",
                        absl::FormatDuration(s_.timing.kill_bound)));
    }
  }
  KeepSession(s_, now_, out_);
}

void Decision::Finish() {
  LaunchWaiting();
  FlushReports(s_, now_, out_);
  if (!s_.shutdown_until.has_value()) return;
  const bool all_gone = std::all_of(s_.ranks.begin(), s_.ranks.end(),
                                    [](const auto& entry) { return IsGone(entry.second); });
  const bool told = s_.ranks.empty() || s_.phase != SessionPhase::kOpen;
  if ((all_gone && told) || now_ >= *s_.shutdown_until) out_.push_back(ShutdownComplete{});
}

// --- the coordinator ---

void Decision::On(const SessionClosed& event) {
  if (event.session != s_.session || s_.phase == SessionPhase::kClosed) return;
  if (s_.phase == SessionPhase::kOpen) {
    Tell(absl::StrCat("the session to the coordinator closed: ", event.reason));
  } else if (s_.told_refusal != event.reason) {
    s_.told_refusal = event.reason;
    Tell(absl::StrCat("no session with the coordinator: ", event.reason, "; trying again"));
  }
  LoseSession(s_, now_);
}

void Decision::On(const FromCoordinator& event) {
  if (event.session != s_.session || s_.phase == SessionPhase::kClosed) return;
  s_.heard_at = now_;
  const v1::CoordinatorMessage& message = event.message;
  if (message.kind_case() == v1::CoordinatorMessage::kHelloAck) {
    return AcceptHelloAck(s_, message.hello_ack(), now_, out_);
  }
  if (s_.phase != SessionPhase::kOpen) return;
  switch (message.kind_case()) {
    case v1::CoordinatorMessage::kHeartbeatAck:
      return AcceptHeartbeatAck(s_, message.heartbeat_ack().sequence());
    case v1::CoordinatorMessage::kRankAck:
      return AcceptRankAck(s_, message.rank_ack().sequence());
    case v1::CoordinatorMessage::kStart:
      return Start(message.start());
    case v1::CoordinatorMessage::kPeers:
      return Introduce(message.peers());
    case v1::CoordinatorMessage::kStop:
      return Stop(message.stop());
    case v1::CoordinatorMessage::kOpenLog:
      if (IsPlainName(message.open_log().ref().fence().job_id()))
        out_.push_back(UploadLog{message.open_log()});
      return;
    default:
      return;
  }
}

bool Decision::Accepts(const v1::Fence& fence) {
  if (fence.epoch() < s_.epoch) {
    Tell(absl::StrCat("refused an order of coordinator epoch ", fence.epoch(), ": epoch ", s_.epoch,
                      " has spoken"));
    return false;
  }
  s_.epoch = fence.epoch();
  return true;
}

std::string Decision::RefusalOf(const v1::StartRank& start) const {
  const v1::Fence& fence = start.ref().fence();
  if (s_.shutdown_until.has_value()) return "the worker is shutting down";
  if (!IsPlainName(fence.job_id()) || !IsPlainName(fence.nonce())) {
    return "job id and nonce must be 1 to 128 letters, digits, '-', '_' or '.', and not start with "
           "'.'";
  }
  if (start.slot() < 0 || start.slot() >= s_.identity.num_slots()) {
    return absl::StrCat("slot ", start.slot(), " does not exist: the worker has ",
                        s_.identity.num_slots());
  }
  if (start.ref().rank() < 0 || start.ref().rank() >= start.node_ids_size()) {
    return absl::StrCat("rank ", start.ref().rank(), " is none of the ", start.node_ids_size(),
                        " of this job");
  }
  const auto newest = s_.newest_generation.find(fence.job_id());
  if (newest != s_.newest_generation.end() && fence.generation() < newest->second) {
    return absl::StrCat("generation ", fence.generation(), " is lower than ", newest->second,
                        ", which this worker has seen");
  }
  const auto stopped = s_.stopped_generation.find(fence.job_id());
  if (stopped != s_.stopped_generation.end() && fence.generation() <= stopped->second) {
    return absl::StrCat("generation ", fence.generation(), " was already ordered to stop");
  }
  for (const auto& [key, rank] : s_.ranks) {
    const bool superseded =
        FenceOf(rank).job_id() == fence.job_id() && FenceOf(rank).generation() < fence.generation();
    if (IsGone(rank) || superseded) continue;
    if (rank.report.slot() == start.slot()) {
      return absl::StrCat("slot ", start.slot(), " is held by ", Name(rank));
    }
    if (FenceOf(rank).job_id() == fence.job_id() && key.nonce != fence.nonce()) {
      return absl::StrCat("generation ", fence.generation(), " already runs under another nonce");
    }
  }
  return "";
}

// Orders every older generation of the job here to die; their slots free on proof.
void Decision::Supersede(const v1::Fence& fence) {
  for (auto& [key, rank] : s_.ranks) {
    if (FenceOf(rank).job_id() != fence.job_id() ||
        FenceOf(rank).generation() >= fence.generation())
      continue;
    Kill(key, rank, v1::CAUSE_KIND_PREEMPTION,
         absl::StrCat("superseded by generation ", fence.generation()), fence.generation());
  }
}

void Decision::Start(const v1::StartRank& start) {
  const v1::Fence& fence = start.ref().fence();
  if (!Accepts(fence)) return;
  const RankKey key{fence.nonce(), start.ref().rank()};
  if (const auto known = s_.ranks.find(key); known != s_.ranks.end()) {
    Changed(known->second);
    return;
  }
  const std::string refusal = RefusalOf(start);
  Rank& rank = s_.ranks[key];
  *rank.report.mutable_ref() = start.ref();
  rank.report.set_slot(start.slot());
  if (!refusal.empty()) {
    Tell(absl::StrCat("refused to start ", Name(rank), ": ", refusal));
    return EndWithoutProcess(rank, v1::CAUSE_KIND_LAUNCH,
                             absl::StrCat("start refused (ABORTED): ", refusal));
  }
  s_.newest_generation[fence.job_id()] = fence.generation();
  rank.start = std::make_shared<const v1::StartRank>(start);
  SetState(rank, v1::RANK_STATE_PLACED);
  Supersede(fence);
}

// Launches placed ranks whose job has nothing older left here. The slot is free by the same test:
// only an older generation of the own job can have held it.
void Decision::LaunchWaiting() {
  for (auto& [key, rank] : s_.ranks) {
    if (rank.launched || rank.report.state() != v1::RANK_STATE_PLACED) continue;
    const bool blocked = std::any_of(s_.ranks.begin(), s_.ranks.end(), [&](const auto& other) {
      return !IsGone(other.second) && FenceOf(other.second).job_id() == FenceOf(rank).job_id() &&
             FenceOf(other.second).generation() < FenceOf(rank).generation();
    });
    if (blocked) continue;
    rank.launched = true;
    out_.push_back(
        LaunchRank{key, rank.report.slot(), FenceOf(rank).job_id(), FenceOf(rank).generation(),
                   std::max(1, rank.start->plan().spec().parallel().threads_per_rank())});
  }
}

void Decision::Stop(const v1::StopRanks& stop) {
  const v1::Fence& fence = stop.fence();
  if (!Accepts(fence)) return;
  int64_t& stopped = s_.stopped_generation[fence.job_id()];
  stopped = std::max(stopped, fence.generation());
  for (auto& [key, rank] : s_.ranks) {
    if (key.nonce != fence.nonce() || IsEnded(rank)) continue;
    if (stop.grace_millis() <= 0 || !rank.launched) {
      Kill(key, rank, v1::CAUSE_KIND_USER, stop.reason());
      continue;
    }
    if (rank.terminate_sent) continue;
    rank.terminate_sent = true;
    rank.kill_cause.set_kind(v1::CAUSE_KIND_USER);
    rank.kill_cause.set_message(stop.reason());
    rank.kill_cause.set_node(s_.identity.worker());
    rank.grace_until = now_ + absl::Milliseconds(stop.grace_millis());
    if (rank.connection != 0) {
      v1::WorkerCommand command;
      command.mutable_stop()->set_reason(stop.reason());
      out_.push_back(SendToTrainer{rank.connection, command});
    }
    out_.push_back(TerminateRank{key});
  }
}

void Decision::Introduce(const v1::Peers& peers) {
  if (!Accepts(peers.fence())) return;
  const std::string& nonce = peers.fence().nonce();
  bool known = false;
  for (auto& [key, rank] : s_.ranks) {
    if (key.nonce != nonce || IsEnded(rank)) continue;
    known = true;
    if (rank.report.state() != v1::RANK_STATE_READY || rank.connection == 0) continue;
    v1::WorkerCommand command;
    *command.mutable_peers() = peers;
    out_.push_back(SendToTrainer{rank.connection, command});
  }
  if (known) s_.peers[nonce] = peers;
}

// --- trainers ---

void Decision::Reject(uint64_t connection, const std::string& why) {
  Tell(absl::StrCat("closed a trainer's stream: ", why));
  s_.connections.erase(connection);
  out_.push_back(CloseTrainer{connection});
}

void Decision::Attach(uint64_t connection, const v1::TrainerHello& hello) {
  const v1::Fence& fence = hello.ref().fence();
  const auto found = s_.ranks.find(RankKey{fence.nonce(), hello.ref().rank()});
  if (found == s_.ranks.end() || !found->second.launched || IsEnded(found->second) ||
      FenceOf(found->second).job_id() != fence.job_id() ||
      FenceOf(found->second).generation() != fence.generation()) {
    return Reject(connection,
                  absl::StrCat("process ", hello.pid(), " names no rank that runs here"));
  }
  Rank& rank = found->second;
  if (rank.connection != 0)
    return Reject(connection, absl::StrCat(Name(rank), " is attached already"));
  if (rank.pid != 0 && rank.pid != hello.pid()) {
    return Reject(connection, absl::StrCat("process ", hello.pid(), " claims ", Name(rank),
                                           ", which is process ", rank.pid));
  }
  rank.connection = connection;
  rank.claimed_pid = hello.pid();
  s_.connections[connection] = found->first;
  if (rank.pid != 0) Assign(rank);
}

void Decision::Assign(Rank& rank) {
  v1::WorkerCommand command;
  v1::Assignment& assignment = *command.mutable_assignment();
  *assignment.mutable_ref() = rank.report.ref();
  *assignment.mutable_plan() = rank.start->plan();
  *assignment.mutable_node_ids() = rank.start->node_ids();
  out_.push_back(SendToTrainer{rank.connection, command});
}

void Decision::On(const FromTrainer& event) {
  const v1::TrainerMessage& message = event.message;
  if (message.has_hello()) {
    Attach(event.connection, message.hello());
  }
  const auto connection = s_.connections.find(event.connection);
  if (connection == s_.connections.end()) {
    if (!message.has_hello()) Reject(event.connection, "it did not say hello first");
    return;
  }
  const RankKey& key = connection->second;
  Rank& rank = s_.ranks.at(key);
  out_.push_back(ReadTrainer{event.connection});
  if (message.has_finished()) rank.finished = message.finished();
  if (IsEnded(rank)) return;
  if (message.has_ready()) {
    rank.report.set_address(message.ready().address());
    rank.report.set_plan_hash(message.ready().plan_hash());
    SetState(rank, v1::RANK_STATE_READY);
    if (const auto peers = s_.peers.find(key.nonce); peers != s_.peers.end()) {
      v1::WorkerCommand command;
      *command.mutable_peers() = peers->second;
      out_.push_back(SendToTrainer{event.connection, command});
    }
  } else if (message.has_running()) {
    SetState(rank, v1::RANK_STATE_RUNNING);
  } else if (message.has_report()) {
    out_.push_back(RecordStep{key, rank.report.slot(), message.report()});
    *rank.report.mutable_last_step() = message.report();
    SendProgress(s_, rank, message.report(), out_);
  }
}

void Decision::On(const TrainerClosed& event) {
  const auto connection = s_.connections.find(event.connection);
  if (connection == s_.connections.end()) return;
  Rank& rank = s_.ranks.at(connection->second);
  s_.connections.erase(connection);
  rank.connection = 0;
  if (!rank.finished.has_value() && !IsEnded(rank)) rank.detached_until = now_ + kDetachGrace;
}

// --- processes ---

void Decision::On(const ProcessStarted& event) {
  const auto found = s_.ranks.find(event.key);
  if (found == s_.ranks.end() || IsEnded(found->second)) return;
  Rank& rank = found->second;
  rank.pid = event.pid;
  SetState(rank, v1::RANK_STATE_STARTED);
  if (rank.connection == 0) return;
  if (rank.claimed_pid == rank.pid) return Assign(rank);
  const uint64_t connection = std::exchange(rank.connection, 0);
  Reject(connection, absl::StrCat("process ", rank.claimed_pid, " claimed ", Name(rank),
                                  ", which is process ", rank.pid));
}

void Decision::On(const ProcessLaunchFailed& event) {
  const auto found = s_.ranks.find(event.key);
  if (found == s_.ranks.end()) return;
  Rank& rank = found->second;
  Tell(absl::StrCat("cannot launch ", Name(rank), ": ", event.status.ToString()));
  if (rank.kill_sent) {  // killed before its fork: the kill is why, not the launch
    EndWithoutProcess(rank, rank.kill_cause.kind(), rank.kill_cause.message());
  } else {
    EndWithoutProcess(rank, v1::CAUSE_KIND_LAUNCH, std::string(event.status.message()));
  }
  out_.push_back(ReleaseRank{event.key, rank.report.slot()});
  KillSiblings(event.key, rank.report.cause());
}

void Decision::KillSiblings(const RankKey& failed, const v1::Cause& cause) {
  const std::string why =
      absl::StrCat("killed by the worker because rank ", failed.rank, " failed: ", cause.message());
  for (auto& [key, rank] : s_.ranks) {
    if (key.nonce == failed.nonce && key.rank != failed.rank)
      Kill(key, rank, v1::CAUSE_KIND_PEER_FAILURE, why);
  }
}

void Decision::On(const ProcessExited& event) {
  const auto found = s_.ranks.find(event.key);
  if (found == s_.ranks.end() || IsEnded(found->second)) return;
  Rank& rank = found->second;
  const ProcessExit& exit = event.exit;
  const bool ended_well = EndedWell(rank, exit);
  if (!ended_well) {
    *rank.report.mutable_cause() = CauseOfExit(rank, exit, event.positions);
    rank.report.mutable_cause()->set_node(s_.identity.worker());
  }
  if (exit.exit_code.has_value()) rank.report.set_exit_code(*exit.exit_code);
  if (exit.signal.has_value()) rank.report.set_signal(*exit.signal);
  rank.report.set_signal_sent_by_worker(SignalSentByWorker(rank, exit));
  rank.grace_until.reset();
  rank.detached_until.reset();
  if (!rank.gone_until.has_value() && !rank.report.quarantined())
    rank.gone_until = now_ + s_.timing.kill_bound;
  SetState(rank, v1::RANK_STATE_EXITED);
  if (!ended_well && !rank.terminate_sent) KillSiblings(event.key, rank.report.cause());
}

void Decision::On(const ProcessGone& event) {
  const auto found = s_.ranks.find(event.key);
  if (found == s_.ranks.end() || IsGone(found->second)) return;
  Rank& rank = found->second;
  rank.gone_until.reset();
  rank.report.set_quarantined(false);
  SetState(rank, v1::RANK_STATE_GONE);
  out_.push_back(ReleaseRank{event.key, rank.report.slot()});
  const bool last = std::all_of(s_.ranks.begin(), s_.ranks.end(), [&](const auto& entry) {
    return entry.first.nonce != event.key.nonce || IsGone(entry.second);
  });
  if (last) s_.peers.erase(event.key.nonce);
}

void Decision::On(const Shutdown&) {
  if (s_.shutdown_until.has_value()) return;
  s_.shutdown_until = now_ + s_.timing.kill_bound + absl::Seconds(1);
  for (auto& [key, rank] : s_.ranks)
    Kill(key, rank, v1::CAUSE_KIND_NODE_LOST, "its worker was told to stop");
}

}  // namespace

Actions Step(State& state, const Event& event, BootTime now) {
  Actions out;
  Decision decision(state, now, out);
  decision.EnforceAutonomy();
  std::visit([&](const auto& kind) { decision.On(kind); }, event);
  decision.RunTimers();
  decision.Finish();
  return out;
}

BootTime NextWake(const State& state, BootTime now) {
  BootTime wake = now + state.timing.heartbeat;
  const auto consider = [&wake](const std::optional<BootTime>& time) {
    if (time.has_value()) wake = std::min(wake, *time);
  };
  if (state.phase == SessionPhase::kClosed) consider(state.reconnect_at);
  if (state.phase == SessionPhase::kOpen) consider(state.next_heartbeat);
  if (state.last_acknowledged.has_value() && !state.autonomous) {
    consider(*state.last_acknowledged + state.timing.autonomy);
  }
  consider(state.shutdown_until);
  for (const auto& [key, rank] : state.ranks) {
    consider(rank.grace_until);
    consider(rank.detached_until);
    consider(rank.gone_until);
  }
  return wake;
}

}  // namespace upipe::worker
