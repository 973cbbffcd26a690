#include "worker/agent/agent.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/utf8.h"
#include "worker/agent/cause.h"
#include "worker/agent/reporting.h"

namespace upipe::worker {
namespace {

constexpr absl::Duration kDetachGrace =
    absl::Milliseconds(500);  // between a closed stream and the kill

constexpr int kProblemsMax = 8;
constexpr size_t kProblemCharacters = 512;
constexpr size_t kEndCharacters = 4000;
constexpr size_t kRanksMax = 4096;  // with those gone and not yet acknowledged

// What the coordinator takes in a report.
constexpr size_t kAddressBytesMax = 64 << 10;
constexpr size_t kReferenceBytesMax = 1 << 10;  // of a checkpoint
constexpr size_t kStepBytesMax = 64 << 10;
// What a line of the worker's own file may come from.
constexpr size_t kTimelineBytesMax = 4 << 20;

bool IsTooLarge(const v1::TrainerMessage& message) {
  return message.ready().address().size() > kAddressBytesMax ||
         message.ready().resume().ByteSizeLong() > kReferenceBytesMax ||
         message.committed().ByteSizeLong() > kReferenceBytesMax ||
         message.report().ByteSizeLong() > kStepBytesMax ||
         message.timeline().ByteSizeLong() > kTimelineBytesMax;
}

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
  void On(const PositionsRead& event);
  void On(const DevicesRead& event);
  void On(const JobLogsDeleted& event);
  void On(const Tick&) {}
  void On(const Leave& event);
  void On(const Shutdown&) { KillEverything("its worker was told to stop"); }

 private:
  bool Accepts(const v1::Fence& fence);
  void Start(const v1::StartRank& start);
  std::string RefusalOf(const v1::StartRank& start) const;
  void Supersede(const v1::Fence& fence);
  void LaunchWaiting();
  void Stop(const v1::StopRanks& stop);
  void DenyUnknown(const v1::Fence& fence, const v1::RankSlot& placed, const std::string& why);
  void Introduce(const v1::Peers& peers);
  void Retain(const v1::RetainCheckpoints& retain);
  void Notify(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
              BootTime until);
  void KeepLeaving();
  void KillEverything(const std::string& why);
  bool MayEnd() const;
  void Kill(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
            int64_t fence = 0);
  void KillSiblings(const RankKey& failed, const v1::Cause& cause);
  void DropPeers(const std::string& nonce);
  void EndWithoutProcess(Rank& rank, v1::CauseKind kind, const std::string& why);
  void Attach(uint64_t connection, const v1::TrainerHello& hello);
  void Assign(Rank& rank);
  void BecomeReady(const RankKey& key, Rank& rank, const v1::TrainerReady& ready);
  void AddProblem(Rank& rank, const v1::CheckpointProblem& problem);
  v1::Cause CauseOf(v1::CauseKind kind, const std::string& why) const;
  void SetState(Rank& rank, v1::RankState rank_state);
  void Reject(uint64_t connection, const std::string& why);
  void Detach(uint64_t connection);
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

v1::Cause Decision::CauseOf(v1::CauseKind kind, const std::string& why) const {
  v1::Cause cause;
  cause.set_kind(kind);
  cause.set_message(why);
  cause.set_node(s_.identity.worker());
  return cause;
}

void Decision::EndWithoutProcess(Rank& rank, v1::CauseKind kind, const std::string& why) {
  *rank.report.mutable_cause() = CauseOf(kind, why);
  rank.report.mutable_cause()->set_rank(rank.report.ref().rank());
  rank.gone_until.reset();
  SetState(rank, v1::RANK_STATE_GONE);
  DropPeers(FenceOf(rank).nonce());
}

// Once nobody here can want them any more.
void Decision::DropPeers(const std::string& nonce) {
  const bool gone = std::all_of(s_.ranks.begin(), s_.ranks.end(), [&](const auto& entry) {
    return entry.first.nonce != nonce || IsGone(entry.second);
  });
  if (gone) s_.peers.erase(nonce);
}

void Decision::Kill(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
                    int64_t fence) {
  if (IsEnded(rank) || rank.kill_sent) return;
  if (!rank.launched) return EndWithoutProcess(rank, kind, why);
  rank.kill_sent = true;
  rank.grace_until.reset();
  rank.kill_cause = CauseOf(kind, why);
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
      Kill(key, rank, rank.kill_cause.kind(),
           absl::StrCat(rank.kill_cause.message(), "; it did not leave within the grace"));
    }
    if (rank.detached_until.has_value() && now_ >= *rank.detached_until) {
      rank.detached_until.reset();
      Kill(key, rank, v1::CAUSE_KIND_INTERNAL,
           rank.finished.has_value() ? "reported its end and went on running"
                                     : "closed its stream to the worker and went on running");
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
  KeepLeaving();
  KeepSession(s_, now_, out_);
}

void Decision::Finish() {
  LaunchWaiting();
  FlushReports(s_, now_, out_);
  if (MayEnd()) out_.push_back(ShutdownComplete{});
}

// --- leaving ---

void Decision::On(const Leave&) {
  if (s_.left_at.has_value() || s_.shutdown_until.has_value()) return;
  s_.left_at = now_;
  s_.next_heartbeat = now_;  // tells the coordinator
  Tell(absl::StrCat("leaving: takes no new ranks, and ends once its own have left, within ",
                    absl::FormatDuration(s_.leave_grace)));
  for (auto& [key, rank] : s_.ranks) {
    if (!rank.launched) Kill(key, rank, v1::CAUSE_KIND_NODE_LOST, "its worker is leaving");
  }
}

// The coordinator stops our ranks together with those of other workers. When it is silent we ask
// them ourselves: a notice reaches the whole gang through any of its ranks.
void Decision::KeepLeaving() {
  if (!s_.left_at.has_value() || s_.shutdown_until.has_value()) return;
  const BootTime until = *s_.left_at + s_.leave_grace;
  if (now_ >= until) {
    return KillEverything(absl::StrCat("its worker was told to stop, and it did not leave within ",
                                       absl::FormatDuration(s_.leave_grace)));
  }
  if (s_.gave_notice || now_ < SilentWhileLeavingAt(s_)) return;
  s_.gave_notice = true;
  Tell("the coordinator does not answer: asking the ranks here to leave");
  for (auto& [key, rank] : s_.ranks)
    Notify(key, rank, v1::CAUSE_KIND_NODE_LOST, "its worker was told to stop", until);
}

void Decision::KillEverything(const std::string& why) {
  if (s_.shutdown_until.has_value()) return;
  s_.shutdown_until = now_ + s_.timing.kill_bound + absl::Seconds(1);
  for (auto& [key, rank] : s_.ranks) Kill(key, rank, v1::CAUSE_KIND_NODE_LOST, why);
}

bool Decision::MayEnd() const {
  if (s_.shutdown_until.has_value()) {
    if (now_ >= *s_.shutdown_until) return true;
  } else if (!s_.left_at.has_value()) {
    return false;
  }
  const bool all_gone = std::all_of(s_.ranks.begin(), s_.ranks.end(),
                                    [](const auto& entry) { return IsGone(entry.second); });
  if (!all_gone) return false;
  if (s_.shutdown_until.has_value()) return s_.ranks.empty() || s_.phase != SessionPhase::kOpen;
  if (now_ >= SilentWhileLeavingAt(s_)) return true;
  // Once it has acknowledged that we leave, no start is on its way any more.
  return s_.ranks.empty() &&
         (s_.phase != SessionPhase::kOpen || s_.last_acknowledged >= s_.left_at);
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
    case v1::CoordinatorMessage::kRetain:
      return Retain(message.retain());
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
  if (s_.shutdown_until.has_value() || s_.left_at.has_value()) return "the worker is leaving";
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
  // An acknowledgement that came late does not make the time of what it allowed: the start is said
  // again once a heartbeat is acknowledged.
  if (s_.autonomous) return Tell("ignored a start: the deadline of this worker has passed");
  if (s_.ranks.size() >= kRanksMax) {
    return Tell(absl::StrCat("ignored a start: the coordinator has acknowledged none of ",
                             s_.ranks.size(), " ranks"));
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
    const v1::Fence& fence = FenceOf(rank);
    const bool blocked = std::any_of(s_.ranks.begin(), s_.ranks.end(), [&](const auto& other) {
      return !IsGone(other.second) && FenceOf(other.second).job_id() == fence.job_id() &&
             FenceOf(other.second).generation() < fence.generation();
    });
    if (blocked) continue;
    rank.launched = true;
    out_.push_back(
        LaunchRank{key, rank.report.slot(), fence.job_id(), fence.generation(),
                   std::max(1, rank.start->plan().spec().parallel().threads_per_rank())});
  }
}

void Decision::Stop(const v1::StopRanks& stop) {
  const v1::Fence& fence = stop.fence();
  if (!Accepts(fence)) return;
  if (s_.newest_generation.contains(fence.job_id())) {
    int64_t& stopped = s_.stopped_generation[fence.job_id()];
    stopped = std::max(stopped, fence.generation());
  }
  for (auto& [key, rank] : s_.ranks) {
    if (key.nonce != fence.nonce()) continue;
    if (stop.grace_millis() <= 0) {
      Kill(key, rank, v1::CAUSE_KIND_USER, stop.reason());
    } else {
      Notify(key, rank, v1::CAUSE_KIND_USER, stop.reason(),
             now_ + absl::Milliseconds(stop.grace_millis()));
    }
  }
  for (const v1::RankSlot& placed : stop.ranks()) DenyUnknown(fence, placed, stop.reason());
}

// The start of a rank that is to stop never came, or was ignored; now it comes no more.
void Decision::DenyUnknown(const v1::Fence& fence, const v1::RankSlot& placed,
                           const std::string& why) {
  const RankKey key{fence.nonce(), placed.rank()};
  if (s_.ranks.contains(key) || s_.ranks.size() >= kRanksMax) return;
  Rank& rank = s_.ranks[key];
  *rank.report.mutable_ref()->mutable_fence() = fence;
  rank.report.mutable_ref()->set_rank(placed.rank());
  rank.report.set_slot(placed.slot());
  EndWithoutProcess(rank, v1::CAUSE_KIND_USER, absl::StrCat(why, "; it had not started"));
}

// Asks a rank to leave at a step boundary, until `until`; an earlier bound stays. One that has not
// begun to train has nothing to keep and ends at once.
void Decision::Notify(const RankKey& key, Rank& rank, v1::CauseKind kind, const std::string& why,
                      BootTime until) {
  if (IsEnded(rank) || rank.kill_sent) return;
  if (rank.report.state() != v1::RANK_STATE_RUNNING) return Kill(key, rank, kind, why);
  rank.kill_cause = CauseOf(kind, why);
  if (rank.grace_until.has_value()) {
    rank.grace_until = std::min(*rank.grace_until, until);
    return;
  }
  rank.grace_until = until;
  v1::WorkerCommand command;
  command.mutable_stop()->set_reason(why);
  if (rank.connection != 0) out_.push_back(SendToTrainer{rank.connection, command});
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

void Decision::Retain(const v1::RetainCheckpoints& retain) {
  if (!Accepts(retain.fence())) return;
  const auto found = s_.ranks.find(RankKey{retain.fence().nonce(), 0});
  if (found == s_.ranks.end() || IsEnded(found->second) || found->second.connection == 0) return;
  v1::WorkerCommand command;
  *command.mutable_retain() = retain;
  out_.push_back(SendToTrainer{found->second.connection, command});
}

// --- trainers ---

void Decision::Reject(uint64_t connection, const std::string& why) {
  Tell(absl::StrCat("closed a trainer's stream: ", why));
  Detach(connection);
  out_.push_back(CloseTrainer{connection});
}

// Of a rank whose stream is over the exit is due.
void Decision::Detach(uint64_t connection) {
  const auto found = s_.connections.find(connection);
  if (found == s_.connections.end()) return;
  Rank& rank = s_.ranks.at(found->second);
  s_.connections.erase(found);
  rank.connection = 0;
  if (IsEnded(rank)) return;
  rank.detached_until = now_ + (rank.finished.has_value() ? s_.timing.kill_bound : kDetachGrace);
}

void Decision::Attach(uint64_t connection, const v1::TrainerHello& hello) {
  if (s_.connections.contains(connection)) return Reject(connection, "it said hello twice");
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
  if (IsTooLarge(message)) {
    return Reject(event.connection, absl::StrCat("its message of ", message.ByteSizeLong(),
                                                 " bytes is more than a report may hold"));
  }
  const RankKey& key = connection->second;
  Rank& rank = s_.ranks.at(key);
  out_.push_back(ReadTrainer{event.connection});
  if (message.has_finished()) {
    rank.finished = message.finished();
    rank.finished->set_message(ToUtf8(message.finished().message(), kEndCharacters));
  }
  if (message.has_committed()) {  // a fact, also of a rank that has ended meanwhile
    *rank.report.mutable_last_commit() = message.committed();
    Changed(rank);
    if (!IsGone(rank)) out_.push_back(RecordCheckpoint{rank.report.slot(), message.committed()});
  } else if (message.has_problem()) {
    AddProblem(rank, message.problem());
  }
  if (IsEnded(rank)) return;
  if (message.has_ready()) {
    BecomeReady(key, rank, message.ready());
  } else if (message.has_running()) {
    SetState(rank, v1::RANK_STATE_RUNNING);
  } else if (message.has_report()) {
    out_.push_back(RecordStep{key, rank.report.slot(), message.report()});
    *rank.report.mutable_last_step() = message.report();
    SendProgress(s_, rank, message.report(), out_);
  } else if (message.has_timeline()) {
    RecordTimeline action{key, message.timeline()};
    action.timeline.set_rank(key.rank);
    action.timeline.set_generation(FenceOf(rank).generation());
    out_.push_back(std::move(action));
  }
}

void Decision::BecomeReady(const RankKey& key, Rank& rank, const v1::TrainerReady& ready) {
  rank.report.set_address(ready.address());
  rank.report.set_plan_hash(ready.plan_hash());
  if (ready.has_resume()) *rank.report.mutable_resume() = ready.resume();
  for (const v1::CheckpointProblem& problem : ready.passed_over()) AddProblem(rank, problem);
  SetState(rank, v1::RANK_STATE_READY);
  const auto peers = s_.peers.find(key.nonce);
  if (peers == s_.peers.end()) return;
  v1::WorkerCommand command;
  *command.mutable_peers() = peers->second;
  out_.push_back(SendToTrainer{rank.connection, command});
}

// The newest few: a full disk has one at every interval.
void Decision::AddProblem(Rank& rank, const v1::CheckpointProblem& problem) {
  auto& problems = *rank.report.mutable_problems();
  if (problems.size() == kProblemsMax) problems.erase(problems.begin());
  v1::CheckpointProblem& added = *problems.Add();
  added = problem;
  added.set_message(ToUtf8(problem.message(), kProblemCharacters));
  Changed(rank);
  out_.push_back(RecordProblem{rank.report.slot()});
}

void Decision::On(const TrainerClosed& event) { Detach(event.connection); }

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
  s_.connections.erase(connection);  // the rank's own stream is still to come
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
  out_.push_back(RecordExit{RankOutcome::kNotStarted});
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
  const bool on_notice = LeftOnNotice(rank, exit);
  rank.report.set_stopped_on_notice(on_notice);
  if (!ended_well && !on_notice) {
    *rank.report.mutable_cause() = CauseOfExit(rank, exit, event.positions);
    rank.report.mutable_cause()->set_node(s_.identity.worker());
  }
  if (exit.exit_code.has_value()) rank.report.set_exit_code(*exit.exit_code);
  if (exit.signal.has_value()) rank.report.set_signal(*exit.signal);
  if (exit.exit_code.has_value() && rank.finished.has_value() && rank.finished->has_measured()) {
    *rank.report.mutable_measured() = rank.finished->measured();
  }
  rank.report.set_signal_sent_by_worker(SignalSentByWorker(rank, exit));
  out_.push_back(RecordExit{ended_well                       ? RankOutcome::kFinished
                            : on_notice                      ? RankOutcome::kLeftOnNotice
                            : SignalSentByWorker(rank, exit) ? RankOutcome::kKilled
                                                             : RankOutcome::kFailed});
  rank.grace_until.reset();
  rank.detached_until.reset();
  if (!rank.gone_until.has_value() && !rank.report.quarantined())
    rank.gone_until = now_ + s_.timing.kill_bound;
  SetState(rank, v1::RANK_STATE_EXITED);
  // A gang leaves together: each on its own, once the last collective is over.
  if (!ended_well && !on_notice) KillSiblings(event.key, rank.report.cause());
}

void Decision::On(const ProcessGone& event) {
  const auto found = s_.ranks.find(event.key);
  if (found == s_.ranks.end() || IsGone(found->second)) return;
  Rank& rank = found->second;
  rank.gone_until.reset();
  if (rank.report.quarantined())
    Tell(absl::StrCat("slot ", rank.report.slot(), " is out of quarantine: ", Name(rank),
                      " is proven gone"));
  rank.report.set_quarantined(false);
  SetState(rank, v1::RANK_STATE_GONE);
  out_.push_back(ReleaseRank{event.key, rank.report.slot()});
  DropPeers(event.key.nonce);
}

void Decision::On(const PositionsRead& event) {
  s_.next_look = now_ + s_.timing.heartbeat;
  for (const auto& [nonce, positions] : event.attempts) {
    for (const v1::RankPosition& position : positions) {
      const auto found = s_.ranks.find(RankKey{nonce, position.rank()});
      if (found == s_.ranks.end()) continue;
      Rank& rank = found->second;
      // A pause of this machine stopped the ranks as well: no gap counts for more than two looks.
      const bool moved =
          !rank.position_read_at.has_value() || position.changes() != rank.position.changes();
      rank.in_place =
          moved ? absl::ZeroDuration()
                : rank.in_place + std::min(now_ - *rank.position_read_at, s_.timing.heartbeat * 2);
      rank.position_read_at = now_;
      rank.position = position;
    }
  }
}

void Decision::On(const DevicesRead& event) {
  auto& known = *s_.identity.mutable_devices();
  for (size_t slot = 0; slot < event.devices.size(); ++slot) {
    const std::string& sick = event.devices[slot].sick();
    if (sick == (static_cast<int>(slot) < known.size() ? known[slot].sick() : "")) continue;
    Tell(sick.empty() ? absl::StrCat("the device of slot ", slot, " is well again")
                      : absl::StrCat("the device of slot ", slot, " is sick: ", sick));
  }
  known.Assign(event.devices.begin(), event.devices.end());
  s_.next_heartbeat = std::min(s_.next_heartbeat, now_);  // tells the coordinator
}

void Decision::On(const JobLogsDeleted& event) {
  const bool here = std::any_of(s_.ranks.begin(), s_.ranks.end(), [&](const auto& entry) {
    return FenceOf(entry.second).job_id() == event.job;
  });
  if (here) return;
  s_.newest_generation.erase(event.job);
  s_.stopped_generation.erase(event.job);
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

bool PositionsDue(const State& state, BootTime now) {
  if (now < state.next_look && (state.phase != SessionPhase::kOpen || now < state.next_heartbeat)) {
    return false;
  }
  return std::any_of(state.ranks.begin(), state.ranks.end(),
                     [](const auto& entry) { return IsLive(entry.second); });
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
  if (state.left_at.has_value()) {
    consider(*state.left_at + state.leave_grace);
    if (now < SilentWhileLeavingAt(state)) consider(SilentWhileLeavingAt(state));
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
