// A client's end of a Logs stream: one chunk on its way at a time.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::coordinator {

// Thread-safe.
class LogStream : public grpc::ServerWriteReactor<v1::LogsResponse> {
 public:
  LogStream(std::function<void()> on_done) : on_done_(std::move(on_done)) {}

  // Who sends has come; `broken` is called if the client leaves first. False when it has
  // left, or when a sender is attached already.
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

}  // namespace upipe::coordinator
