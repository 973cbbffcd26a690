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
struct HoldCall {
  v1::HoldRequest request;
  Done<v1::HoldResponse> done;
};
struct ReleaseCall {
  v1::ReleaseRequest request;
  Done<v1::ReleaseResponse> done;
};
struct WhyCall {
  v1::WhyRequest request;
  Done<v1::WhyResponse> done;
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
struct CordonCall {
  v1::CordonRequest request;
  Done<v1::CordonResponse> done;
};
struct DrainCall {
  v1::DrainRequest request;
  Done<v1::DrainResponse> done;
};
struct UncordonCall {
  v1::UncordonRequest request;
  Done<v1::UncordonResponse> done;
};
struct FenceNodeCall {
  v1::FenceNodeRequest request;
  Done<v1::FenceNodeResponse> done;
};
struct ForgetNodeCall {
  v1::ForgetNodeRequest request;
  Done<v1::ForgetNodeResponse> done;
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
// Copies the store into a new file at `path`; answers, on the store thread, with its revision.
struct BackupCall {
  std::string path;
  Done<int64_t> done;
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

using Request = std::variant<SubmitCall, CancelCall, HoldCall, ReleaseCall, WhyCall, GetJobCall,
                             ListJobsCall, ListNodesCall, CordonCall, DrainCall, UncordonCall,
                             FenceNodeCall, ForgetNodeCall, WatchCall, WatchEnded, LogCall,
                             BackupCall, SessionMessage, SessionEnded, PlanEnded, Wake>;

}  // namespace upipe::coordinator
