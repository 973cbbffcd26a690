// The coordinator as the command line sees it: blocking calls that return absl::Status in words for
// a person. An interface so that commands are tested without a network; the only implementation
// with gRPC is behind ConnectCoordinator.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::client {

// Unary calls are never repeated here. Errors carry a reason of common/errors: the coordinator's,
// or COORDINATOR_UNREACHABLE, CALL_DROPPED, CALL_LATE with its address; after Unavailable and
// DeadlineExceeded the caller may try again. Not for use by several threads at once.
class CoordinatorClient {
 public:
  // Each returns false to end its stream; the call is then OK.
  using OnWatch = std::function<bool(const v1::WatchResponse&)>;
  using OnLogs = std::function<bool(const v1::LogsResponse&)>;
  using OnBackup = std::function<bool(const v1::BackupResponse&)>;

  virtual ~CoordinatorClient() = default;
  virtual absl::StatusOr<v1::Job> Submit(const v1::SubmitRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> GetJob(const std::string& id) = 0;
  // One page.
  virtual absl::StatusOr<v1::ListJobsResponse> ListJobs(const v1::ListJobsRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> Cancel(const v1::CancelRequest& request) = 0;
  virtual absl::StatusOr<v1::Job> Hold(const std::string& id) = 0;
  virtual absl::StatusOr<v1::Job> Release(const std::string& id) = 0;
  virtual absl::StatusOr<v1::WhyResponse> Why(const std::string& id) = 0;
  virtual absl::StatusOr<v1::ListNodesResponse> ListNodes() = 0;
  virtual absl::StatusOr<v1::Node> Cordon(const v1::CordonRequest& request) = 0;
  virtual absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request) = 0;
  virtual absl::StatusOr<v1::Node> Uncordon(const std::string& worker) = 0;
  virtual absl::StatusOr<v1::Node> FenceNode(const std::string& worker) = 0;
  virtual absl::Status ForgetNode(const std::string& worker) = 0;
  // Blocks until the server ends the stream, `on_message` returns false, or `limit` is over
  // (DeadlineExceeded).
  virtual absl::Status Watch(const std::string& id, absl::Duration limit,
                             const OnWatch& on_message) = 0;
  virtual absl::Status Logs(const v1::LogsRequest& request, const OnLogs& on_message) = 0;
  // The pieces of a copy of the coordinator's store, in order.
  virtual absl::Status Backup(const OnBackup& on_message) = 0;
};

inline constexpr absl::Duration kUnaryDeadline = absl::Seconds(10);

// Does not touch the network yet. `address` is host:port; `deadline` is for each unary call.
std::unique_ptr<CoordinatorClient> ConnectCoordinator(const std::string& address,
                                                      absl::Duration deadline = kUnaryDeadline);

}  // namespace upipe::client
