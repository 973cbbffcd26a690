// Everything the coordinator knows: jobs, their latest attempt, nodes and who holds each slot.
// Filled from the store at start, then changed only by Step.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "coordinator/core/event.h"
#include "coordinator/core/tally.h"
#include "coordinator/core/timing.h"
#include "coordinator/core/transitions.h"
#include "upipe/v1/node_service.pb.h"
#include "upipe/v1/store.pb.h"

namespace upipe::coordinator {

// What an attempt knows beyond its record: lost at a restart, told again by the workers' hellos.
struct RankSoftState {
  std::string address;                          // empty until READY
  uint64_t plan_hash = 0;                       // of the plan the trainer was given
  std::optional<v1::CheckpointRef> proposal;    // rank 0: what it would go on from
  std::vector<v1::CheckpointProblem> problems;  // as its last report listed them
  std::optional<v1::RankPosition> position;     // by the latest heartbeat that told it
  BootTime position_at;                         // when that came
  BootTime step_at;                             // when its latest step report came
};

struct Attempt {
  v1::AttemptRecord record;
  std::vector<RankSoftState> soft;  // [ranks]
  int64_t revision = 0;             // of its record in the store
  BootTime placed_at;               // the time limit counts from here
  BootTime last_launch;             // the start deadline counts from here
  BootTime kill_at;                 // STOPPING: grace ends
  BootTime counted_until;           // its time up to here is in the tally
  bool peers_sent = false;          // the address table went out once; it is soft and re-sent
};

// A generation that was closed while ranks of it were not proven gone. Its record goes when they
// are.
struct EarlierAttempt {
  v1::AttemptRecord record;
  int64_t revision = 0;
};

struct Job {
  v1::JobRecord record;
  std::shared_ptr<const v1::RunPlan> plan;    // null until planned
  std::optional<Attempt> attempt;             // the latest one, closed or not
  std::map<int64_t, EarlierAttempt> earlier;  // by generation
  int64_t revision = 0;                       // of its record in the store
  bool planner_running = false;
  bool plan_unsaved = false;
  bool request_unsaved = false;
  std::string reason;                  // PLANNING, QUEUED, STOPPING: what it waits for
  BootTime known_since;                // submitted or loaded
  BootTime retry_at;                   // QUEUED: the back-off ends
  std::optional<BootTime> stopped_at;  // when the attempt before began to end, of a restart
};

// Order of the queue: higher priority first, equal ones as they came.
using QueueKey = std::pair<int32_t, int64_t>;  // -priority, submit number
inline QueueKey KeyOf(const v1::JobRecord& job) {
  return {-job.spec().priority(), job.submit_number()};
}

// Who holds a slot; kept until that rank is proven gone, also after its job ended.
struct SlotHolder {
  std::string job_id;
  int64_t generation = 0;
  std::string nonce;
  int32_t rank = 0;
  bool quarantined = false;  // its worker killed it and could not prove it gone in time
};

struct Slot {
  std::optional<SlotHolder> holder;
  // What its worker says lives in it although the store gave it to the holder: the store is a
  // backup's. Becomes the holder after it.
  std::optional<SlotHolder> stray;
  v1::SlotDevice device;  // as its worker last told; nothing on backends without devices

  // The holder is gone.
  void Release() { holder = std::exchange(stray, std::nullopt); }
};

struct Node {
  v1::NodeRecord record;
  int64_t revision = 0;  // of its record in the store
  SessionId session = 0;
  int64_t session_number = 0;  // of the latest hello; 0: none since this coordinator started
  BootTime last_heard;         // receive time of its latest message; loading counts as one
  bool greeted = false;        // said hello since this coordinator started, and was not LOST since
  bool lost = false;
  bool leaving = false;  // its worker was told to stop
  bool suspect_told = false;
  std::vector<Slot> slots;
  // Earlier starts of the worker, the newest few: a hello of theirs is old although its state
  // folder is another, whose starts are numbered on their own.
  std::vector<std::string> superseded;  // incarnations
};

// How long records of ended jobs are kept: the newest ones, none older than the age.
struct Retention {
  int64_t jobs = 10'000;                      // 1 or more
  absl::Duration age = absl::Hours(24 * 90);  // > 0
};

struct State {
  Timing timing;
  Retention retention;
  int64_t epoch = 0;
  int64_t revision = 0;  // of the last batch handed out
  int64_t next_submit_number = 1;
  std::function<std::string()> new_nonce;     // 32 hex digits, fresh at every call
  std::map<std::string, Job> jobs;            // by id
  std::map<QueueKey, std::string> unplanned;  // PLANNING
  std::map<QueueKey, std::string> queue;      // QUEUED
  std::string head;  // the first job that waits for busy slots: nobody behind it is placed
  std::set<std::string> active;                     // STARTING, RUNNING, STOPPING
  std::set<std::pair<int64_t, std::string>> ended;  // terminal ones: when by the wall clock, id
  std::map<v1::JobState, int64_t> num_ended;        // of these, by state
  absl::flat_hash_map<std::string, std::string> job_of_request;  // request id -> job id
  std::map<std::string, Node> nodes;                             // by worker name
  absl::flat_hash_map<SessionId, std::string> worker_of_session;
  BootTime last_node_joined;
  BootTime next_resend;
  bool restored = false;       // from a backup, and not every known worker has said hello since
  int64_t epoch_revision = 0;  // of the epoch's record
  Tally tally;
  Transitions transitions;
};

// The state a store holds, at a new epoch. `actions` gets the batch that makes the epoch durable;
// planner children are started again by the first Tick. DataLoss names a record that does not
// parse.
struct LoadOptions {
  Timing timing;
  std::function<std::string()> new_nonce;
  Retention retention = {};
};
absl::StatusOr<State> LoadState(Store& store, const LoadOptions& options, Moment now,
                                Actions* actions);

// Whether a guard of the table lets a row pass; a test may have broken it.
inline bool Holds(const State& state, Guard guard, bool condition) {
  return condition || state.transitions.broken == guard;
}

bool IsTerminal(v1::JobState state);
// Keep `ended` and `num_ended` of a record that has become terminal, or is dropped.
void ListEnded(State& state, const v1::JobRecord& job);
void UnlistEnded(State& state, const v1::JobRecord& job);
// PLACED or later, not GONE, and its worker was not forgotten since.
bool HoldsSlot(const v1::RankRecord& rank);
// Exited with code 0, after the last step. Counts as present: the others go on without it.
bool IsFinished(const v1::RankRecord& rank);

// READY: said hello, its session is open, heard of lately. Only such nodes get new ranks.
v1::NodeState StateOf(const State& state, const Node& node, BootTime now);
v1::SlotState StateOf(const State& state, const Node& node, const Slot& slot, BootTime now);

// Whether ranks of a job run on a node: those on cuda on devices, the others on CPUs.
bool IsOfBackend(const Node& node, const v1::JobSpec& spec);

// Slots of all known nodes for such a job, whatever their state.
int64_t NumKnownSlots(const State& state, const v1::JobSpec& spec);
// The bytes per rank that as many slots as it has ranks can offer together: the smallest of the
// largest offers over all known nodes. None when fewer slots are known.
std::optional<int64_t> OfferedBytesPerRank(const State& state, const v1::JobSpec& spec);

}  // namespace upipe::coordinator
