// What a worker decides, without doing any of it: the RANK rows and the timing rules of the control
// plane as one function from (state, event, now) to actions. The daemon (worker/runtime) feeds it
// and carries the actions out in order; tests drive it with invented events and clocks.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "upipe/v1/report.pb.h"
#include "upipe/v1/trainer_service.pb.h"
#include "upipe/v1/worker_service.pb.h"
#include "worker/agent/rank_process.h"

namespace upipe::worker {

// Events. Connections are the daemon's numbers for trainer streams, from 1.
struct SessionClosed {
  uint64_t session = 0;
  std::string reason;
};
struct FromCoordinator {
  uint64_t session = 0;
  v1::CoordinatorMessage message;
};
struct FromTrainer {
  uint64_t connection = 0;
  v1::TrainerMessage message;
};
struct TrainerClosed {
  uint64_t connection = 0;
};
struct ProcessStarted {
  RankKey key;
  int pid = 0;
};
struct ProcessLaunchFailed {
  RankKey key;
  absl::Status status;
};  // proven: nothing of it is left
// `positions`: of every rank of the attempt on this worker, read before anything else is killed.
struct ProcessExited {
  RankKey key;
  ProcessExit exit;
  std::vector<v1::RankPosition> positions;
};
struct ProcessGone {
  RankKey key;
};  // the proof: reaped, tree empty, shared memory removed
// Of every attempt that has live ranks here, by nonce; read now. Asked for by PositionsDue.
struct PositionsRead {
  std::map<std::string, std::vector<v1::RankPosition>> attempts;
};
// By slot, as they are from now on.
struct DevicesRead {
  std::vector<v1::SlotDevice> devices;
};
// The last log of a job is off this disk: nothing else is kept of it either.
struct JobLogsDeleted {
  std::string job;
};
struct Tick {};
struct Leave {};     // gracefully: the ranks go first, on the coordinator's order
struct Shutdown {};  // at once
using Event = std::variant<SessionClosed, FromCoordinator, FromTrainer, TrainerClosed,
                           ProcessStarted, ProcessLaunchFailed, ProcessExited, ProcessGone,
                           PositionsRead, DevicesRead, JobLogsDeleted, Tick, Leave, Shutdown>;

// How a rank ended, as counted.
enum class RankOutcome { kFinished, kLeftOnNotice, kKilled, kFailed, kNotStarted };

// Actions, carried out in order.
struct OpenSession {
  uint64_t session = 0;
};  // later events of it carry this number
struct CloseSession {
  std::string reason;
};
struct SendToCoordinator {
  v1::WorkerMessage message;
};
struct LaunchRank {  // journal, then fork
  RankKey key;
  int slot = 0;
  std::string job;
  int64_t generation = 0;
  int threads = 1;
};
// SIGKILL of the whole tree. With a fence the journal first records that generations of `job` below
// it are over.
struct KillRank {
  RankKey key;
  std::string job;
  int64_t fence_generation = 0;
};
struct SendToTrainer {
  uint64_t connection = 0;
  v1::WorkerCommand command;
};
struct ReadTrainer {
  uint64_t connection = 0;
};  // its last message was taken: the next one may come
struct CloseTrainer {
  uint64_t connection = 0;
};
struct RecordStep {
  RankKey key;
  int slot = 0;
  v1::StepReport report;
};
struct RecordTimeline {
  RankKey key;
  v1::StepTimeline timeline;
};
struct RecordCheckpoint {
  int slot = 0;
  v1::CheckpointRef committed;
};
struct RecordProblem {
  int slot = 0;
};
struct RecordExit {
  RankOutcome outcome = RankOutcome::kFailed;
};
struct ReleaseRank {
  RankKey key;
  int slot = 0;
};  // proven gone
struct UploadLog {
  v1::OpenLog request;
};
struct NodeEvent {
  std::string text;
};
struct ShutdownComplete {};
using Action =
    std::variant<OpenSession, CloseSession, SendToCoordinator, LaunchRank, KillRank, SendToTrainer,
                 ReadTrainer, CloseTrainer, RecordStep, RecordTimeline, RecordCheckpoint,
                 RecordProblem, RecordExit, ReleaseRank, UploadLog, NodeEvent, ShutdownComplete>;
using Actions = std::vector<Action>;

struct TimingRules {
  absl::Duration heartbeat = absl::Seconds(2);    // H
  absl::Duration kill_bound = absl::Seconds(10);  // K
  absl::Duration autonomy = absl::Seconds(300);   // A
};

struct Rank {
  std::shared_ptr<const v1::StartRank> start;
  v1::RankReport report;    // what the coordinator is told
  bool launched = false;    // LaunchRank went out: a process may exist until the proof
  int pid = 0;              // 0 until started
  uint64_t connection = 0;  // the trainer's stream, 0 = none
  int claimed_pid = 0;      // of a hello that came before ProcessStarted
  std::optional<v1::TrainerFinished> finished;
  bool kill_sent = false;
  v1::Cause kill_cause;  // why it was told to leave or killed
  std::optional<BootTime> grace_until;
  std::optional<BootTime> detached_until;  // its stream closed: its exit is due
  std::optional<BootTime> gone_until;      // kill bound K

  v1::RankPosition position;  // as last read
  absl::Duration in_place;    // since `position` changed, of the time this worker was awake
  std::optional<BootTime> position_read_at;

  uint64_t version = 1;               // grows when `report` changes
  bool acknowledged = false;          // of this version
  std::optional<BootTime> resend_at;  // absent: not yet sent in this session
};

enum class SessionPhase { kClosed, kGreeting, kOpen };

struct State {
  v1::Hello identity;  // without ranks and epoch
  TimingRules timing;
  int64_t epoch = 0;  // highest coordinator epoch seen
  std::map<RankKey, Rank> ranks;
  std::map<std::string, int64_t> newest_generation;   // by job, until JobLogsDeleted
  std::map<std::string, int64_t> stopped_generation;  // by job, of those
  std::map<std::string, v1::Peers> peers;             // by nonce
  std::map<uint64_t, RankKey> connections;

  SessionPhase phase = SessionPhase::kClosed;
  uint64_t session = 0;
  uint64_t next_sequence = 1;
  std::map<uint64_t, BootTime> heartbeats;                   // sent, not acknowledged
  std::map<uint64_t, std::pair<RankKey, uint64_t>> reports;  // sequence -> rank, version
  BootTime greeted_at, heard_at, next_heartbeat, reconnect_at, next_look;
  absl::Duration backoff;
  std::string told_refusal;  // why there is no session, as last told

  std::optional<BootTime> last_acknowledged;       // send time of the last acknowledged heartbeat
  bool autonomous = false;                         // the deadline passed: own ranks were killed
  absl::Duration leave_grace = absl::Minutes(10);  // from Leave to the kill of what still runs
  std::optional<BootTime> left_at;                 // Leave came
  bool gave_notice = false;                        // leaving without the coordinator
  std::optional<BootTime> shutdown_until;
};

// Deterministic, no I/O. The autonomy deadline is looked at before the event.
Actions Step(State& state, const Event& event, BootTime now);

// Whether PositionsRead should be the next event: once every H, before the heartbeat that tells
// them.
bool PositionsDue(const State& state, BootTime now);

// When Step must be called with Tick at the latest.
BootTime NextWake(const State& state, BootTime now);

}  // namespace upipe::worker
