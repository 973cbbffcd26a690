// Joins a client's Logs stream with the UploadLog stream its worker opens for it, one chunk at a
// time, so that a slow reader slows the worker and nothing piles up here.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/time/time.h"
#include "common/clock.h"
#include "coordinator/runtime/loop.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::coordinator {

// The client's end. Thread-safe.
class LogStream : public grpc::ServerWriteReactor<v1::LogsResponse> {
 public:
  LogStream(std::function<void()> on_done) : on_done_(std::move(on_done)) {}

  // The worker's end has come; `broken` is called if the client leaves first. False when it has
  // left, or when an upload is attached already.
  bool Attach(std::function<void()> broken);
  // Writes one chunk, then calls `written`. One at a time. False when the client has left.
  bool Write(const v1::LogChunk& chunk, std::function<void()> written);
  void End(const absl::Status& status);
  bool attached() const;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  std::shared_ptr<LogStream> self;  // until OnDone

 private:
  const std::function<void()> on_done_;
  mutable std::mutex mutex_;
  v1::LogsResponse outgoing_;
  std::function<void()> written_;
  std::function<void()> broken_;
  std::optional<absl::Status> end_;
  bool writing_ = false;
  bool finished_ = false;
};

class LogRelay {
 public:
  // Starts a client's stream: asks the loop for the worker, and waits for its upload.
  grpc::ServerWriteReactor<v1::LogsResponse>* Open(const v1::LogsRequest& request, Loop& loop);
  // The worker's end of a stream.
  grpc::ServerReadReactor<v1::LogChunk>* Accept();
  // Ends streams whose worker did not come within `patience`.
  void Expire(BootTime now, absl::Duration patience);
  // Ends every stream.
  void End(const absl::Status& status);

  std::shared_ptr<LogStream> Find(const std::string& upload_id);

 private:
  struct Waiting {
    std::shared_ptr<LogStream> stream;
    BootTime since;
  };
  std::mutex mutex_;
  std::map<std::string, Waiting> streams_;  // by upload id
};

}  // namespace upipe::coordinator
