// What can happen to the coordinator's core, and what it wants done. Values only: sockets, files,
// threads and child processes belong to coordinator/runtime.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "coordinator/store/store.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

using CallId = uint64_t;     // one waiting client call; made by the shell
using SessionId = uint64_t;  // one Session stream of a worker, never reused; 0 = none

// The time of one step: decisions use `boot`, records show `unix_millis`.
struct Moment {
  BootTime boot;
  int64_t unix_millis = 0;
};

// A valid spec with defaults filled in (common/spec). `job_id` is fresh.
struct SubmitReceived {
  CallId call = 0;
  std::string job_id;
  std::string request_id;
  v1::JobSpec spec;
  bool hold = false;
};
// `grace` is what ranks get to leave at a step boundary; absent = half the kill bound.
struct CancelReceived {
  CallId call = 0;
  std::string job_id;
  std::optional<absl::Duration> grace = {};
};
struct HoldReceived {
  CallId call = 0;
  std::string job_id;
};
struct ReleaseReceived {
  CallId call = 0;
  std::string job_id;
};
// The operator's word about a worker; each is answered with ReplyNode.
struct CordonReceived {
  CallId call = 0;
  std::string worker;
  std::string reason;
};
struct UncordonReceived {
  CallId call = 0;
  std::string worker;
};
// Absent grace = Timing.drain_grace.
struct DrainReceived {
  CallId call = 0;
  std::string worker;
  std::string reason;
  std::optional<absl::Duration> grace = {};
};
struct FenceNodeReceived {
  CallId call = 0;
  std::string worker;
};
struct ForgetNodeReceived {
  CallId call = 0;
  std::string worker;
};
// The planner child of a job ended: a result, or why there is none (crash, limit).
struct PlanFinished {
  std::string job_id;
  absl::StatusOr<v1::PlanResult> result;
};
struct HelloReceived {
  SessionId session = 0;
  v1::Hello hello;
};
struct HeartbeatReceived {
  SessionId session = 0;
  uint64_t sequence = 0;
  v1::Heartbeat heartbeat = {};
};
struct RankReported {
  SessionId session = 0;
  uint64_t sequence = 0;
  v1::RankReport report;
};
struct ProgressReceived {
  SessionId session = 0;
  v1::Progress progress;
};
struct SessionClosed {
  SessionId session = 0;
};
// Time passed. Due at least once per heartbeat.
struct Tick {};

using Event = std::variant<SubmitReceived, CancelReceived, HoldReceived, ReleaseReceived,
                           CordonReceived, UncordonReceived, DrainReceived, FenceNodeReceived,
                           ForgetNodeReceived, PlanFinished, HelloReceived, HeartbeatReceived,
                           RankReported, ProgressReceived, SessionClosed, Tick>;

// Answers of Submit, Cancel, Hold and Release.
struct ReplyJob {
  CallId call = 0;
  absl::StatusOr<std::shared_ptr<const v1::Job>> job;
};
// Answers of Cordon, Uncordon, Drain, FenceNode and ForgetNode; the latter's is the record that was
// dropped. `job_ids` are the jobs a drain told to leave.
struct ReplyNode {
  CallId call = 0;
  absl::StatusOr<v1::Node> node;
  std::vector<std::string> job_ids = {};
};
struct SendToWorker {
  SessionId session = 0;
  v1::CoordinatorMessage message;
};
struct CloseSession {
  SessionId session = 0;
  absl::Status why;
};
struct StartPlanner {
  std::string job_id;
  v1::JobSpec spec;
  int64_t memory_per_rank_bytes = 0;
  // Of a job that is planned once more: the plan that fell short, with what was measured in it.
  std::shared_ptr<const v1::RunPlan> earlier = {};
};
struct KillPlanner {
  std::string job_id;
};
// State or events of a job changed: what Watch sends.
struct PublishJob {
  std::shared_ptr<const v1::Job> job;
};
// A new step report of rank 0.
struct PublishReport {
  std::string job_id;
  v1::StepReport report;
};
// A line for the operator's log.
struct LogNote {
  std::string text;
};

using Action = std::variant<ReplyJob, ReplyNode, SendToWorker, CloseSession, StartPlanner,
                            KillPlanner, PublishJob, PublishReport, LogNote>;

// Outcome of one step. `actions` may be carried out only once `batches`, and those of every step
// before, are durable. A batch is atomic; batches are committed in order, each one store revision.
struct Actions {
  std::vector<Batch> batches;
  std::vector<Action> actions;
};

}  // namespace upipe::coordinator
