// What the RPC room hands to the deciding thread, and the narrow ports through which that thread
// answers. No gRPC here: rpc/ implements the ports.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "absl/status/statusor.h"
#include "coordinator/core/event.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"
#include "upipe/v1/worker_service.pb.h"

namespace upipe::coordinator {

// One worker's Session stream. Thread-safe, never blocks; calls after the stream ended do nothing.
class WorkerLink {
 public:
  virtual ~WorkerLink() = default;
  virtual void Send(v1::CoordinatorMessage message) = 0;
  virtual void Close(const absl::Status& why) = 0;
};

// One Watch stream. Thread-safe, never blocks. A slow reader gets the latest of each kind.
class Watcher {
 public:
  virtual ~Watcher() = default;
  virtual void OfferJob(std::shared_ptr<const v1::Job> job) = 0;
  virtual void OfferReport(const v1::StepReport& report) = 0;
  virtual void End(const absl::Status& status) = 0;
};

// Called exactly once, on the deciding thread or, when a request is refused, on the caller's.
template <typename T>
using Done = std::function<void(absl::StatusOr<T>)>;

struct SubmitCall {
  v1::SubmitRequest request;
  Done<v1::SubmitResponse> done;
};
struct CancelCall {
  v1::CancelRequest request;
  Done<v1::CancelResponse> done;
};
struct GetJobCall {
  v1::GetJobRequest request;
  Done<v1::Job> done;
};
struct ListJobsCall {
  v1::ListJobsRequest request;
  Done<v1::ListJobsResponse> done;
};
struct ListNodesCall {
  Done<v1::ListNodesResponse> done;
};
struct WatchCall {
  std::string job_id;
  std::shared_ptr<Watcher> watcher;
};
struct WatchEnded {
  std::shared_ptr<Watcher> watcher;
};
// Asks the worker that ran the rank to open an UploadLog stream named `upload_id`. `done` answers
// with the worker's name.
struct LogCall {
  v1::LogsRequest request;
  std::string upload_id;
  Done<std::string> done;
};
struct SessionMessage {
  SessionId session = 0;
  std::shared_ptr<WorkerLink> link;
  v1::WorkerMessage message;
};
struct SessionEnded {
  SessionId session = 0;
};
struct PlanEnded {
  PlanFinished event;
};
// Something became durable.
struct Wake {};

using Request =
    std::variant<SubmitCall, CancelCall, GetJobCall, ListJobsCall, ListNodesCall, WatchCall,
                 WatchEnded, LogCall, SessionMessage, SessionEnded, PlanEnded, Wake>;

}  // namespace upipe::coordinator
