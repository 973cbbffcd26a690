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
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "coordinator/core/event.h"
#include "coordinator/core/timing.h"
#include "upipe/v1/node_service.pb.h"
#include "upipe/v1/store.pb.h"

namespace upipe::coordinator {

// What an attempt knows beyond its record: lost at a restart, told again by the workers' hellos.
struct RankSoftState {
  std::string address;     // empty until READY
  uint64_t plan_hash = 0;  // of the plan the trainer was given
};

struct Attempt {
  v1::AttemptRecord record;
  std::vector<RankSoftState> soft;  // [ranks]
  int64_t revision = 0;             // of its record in the store
  BootTime last_launch;             // the start deadline counts from here
  BootTime kill_at;                 // STOPPING: grace ends
  bool peers_sent = false;          // the address table went out once; it is soft and re-sent
};

struct Job {
  v1::JobRecord record;
  std::shared_ptr<const v1::RunPlan> plan;  // null until planned
  std::optional<Attempt> attempt;           // the latest one
  int64_t revision = 0;                     // of its record in the store
  bool planner_running = false;
  bool plan_unsaved = false;
  bool request_unsaved = false;
  std::string reason;    // PLANNING, QUEUED, STOPPING: what it waits for
  BootTime known_since;  // submitted or loaded
};

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
};

struct Node {
  v1::NodeRecord record;
  int64_t revision = 0;  // of its record in the store
  SessionId session = 0;
  BootTime last_heard;   // receive time of its latest message; loading counts as one
  bool greeted = false;  // said hello since this coordinator started, and was not LOST since
  bool lost = false;
  bool suspect_told = false;
  std::vector<Slot> slots;
};

struct State {
  Timing timing;
  int64_t epoch = 0;
  int64_t revision = 0;  // of the last batch handed out
  int64_t next_submit_number = 1;
  std::function<std::string()> new_nonce;  // 32 hex digits, fresh at every call
  std::map<std::string, Job> jobs;         // by id
  std::map<int64_t, std::string> queue;    // unplaced jobs, submit number -> id
  std::set<std::string> active;            // STARTING, RUNNING, STOPPING
  absl::flat_hash_map<std::string, std::string> job_of_request;  // request id -> job id
  std::map<std::string, Node> nodes;                             // by worker name
  absl::flat_hash_map<SessionId, std::string> worker_of_session;
  BootTime last_node_joined;
  BootTime next_resend;
};

// The state a store holds, at a new epoch. `actions` gets the batch that makes the epoch durable;
// planner children are started again by the first Tick. DataLoss names a record that does not
// parse.
struct LoadOptions {
  Timing timing;
  std::function<std::string()> new_nonce;
};
absl::StatusOr<State> LoadState(Store& store, const LoadOptions& options, Moment now,
                                Actions* actions);

bool IsTerminal(v1::JobState state);
// PLACED or later and not GONE.
bool HoldsSlot(const v1::RankRecord& rank);
// Exited with code 0.
bool IsFinished(const v1::RankRecord& rank);

// READY: said hello, its session is open, heard of lately. Only such nodes get new ranks.
v1::NodeState StateOf(const State& state, const Node& node, BootTime now);
v1::SlotState StateOf(const State& state, const Node& node, const Slot& slot, BootTime now);

// Slots of all known nodes, whatever their state.
int64_t NumKnownSlots(const State& state);
// The bytes per rank that `ranks` slots can offer together: the smallest of the `ranks` largest
// offers over all known nodes. None when fewer slots are known.
std::optional<int64_t> OfferedBytesPerRank(const State& state, int64_t ranks);

}  // namespace upipe::coordinator
