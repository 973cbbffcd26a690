// The worker's end of its trainers' streams, on a unix socket. Each stream has one message on the
// way to the deciding thread at a time; the next is read when that thread asks.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "upipe/v1/trainer_service.grpc.pb.h"

namespace upipe::worker {

class TrainerServer : public v1::TrainerService::CallbackService {
 public:
  // Called from gRPC's threads. `closed` comes once per connection, last.
  struct Callbacks {
    std::function<void(uint64_t connection, v1::TrainerMessage)> received;
    std::function<void(uint64_t connection)> closed;
  };

  // Replaces a socket file an earlier worker left.
  static absl::StatusOr<std::unique_ptr<TrainerServer>> Start(const std::string& socket_path,
                                                              Callbacks callbacks);
  // Ends every stream; the socket file is removed.
  ~TrainerServer() override;

  // Unknown connections are ignored: they have closed meanwhile. None blocks.
  void Send(uint64_t connection, v1::WorkerCommand command);
  void Read(uint64_t connection);
  void Close(uint64_t connection);

  grpc::ServerBidiReactor<v1::TrainerMessage, v1::WorkerCommand>* Attach(
      grpc::CallbackServerContext* context) override;

 private:
  class Stream;
  TrainerServer(std::string socket_path, Callbacks callbacks)
      : socket_path_(std::move(socket_path)), callbacks_(std::move(callbacks)) {}

  const std::string socket_path_;
  const Callbacks callbacks_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  uint64_t next_connection_ = 1;
  int num_streams_ = 0;  // not yet deleted
  std::condition_variable stream_ended_;
  std::map<uint64_t, Stream*> streams_;  // each deletes itself when gRPC is done with it
};

}  // namespace upipe::worker
