// The worker's one stream to the coordinator. Moves bytes only: what is said and when to reconnect
// is the core's.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::worker {

// Plaintext channel to the coordinator that tries to reconnect often enough for the shortest
// heartbeat.
std::shared_ptr<grpc::Channel> CoordinatorChannel(const std::string& address);

class CoordinatorSession {
 public:
  // Called from gRPC's threads; must not block. `received` returns false when it cannot take the
  // message: the stream then ends. `closed` comes once per Open, last.
  struct Callbacks {
    std::function<bool(uint64_t session, v1::CoordinatorMessage)> received;
    std::function<void(uint64_t session, const std::string& reason)> closed;
  };

  CoordinatorSession(std::shared_ptr<grpc::Channel> channel, Callbacks callbacks);
  // Ends the stream and waits for it.
  ~CoordinatorSession();

  // Dials; an earlier stream is cancelled. Messages may be sent at once.
  void Open(uint64_t session);
  void Close();
  // Never blocks. Progress replaces older progress of the same rank; 4,096 waiting messages end the
  // stream.
  void Send(v1::WorkerMessage message);

 private:
  class Stream;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
  const Callbacks callbacks_;
  std::mutex mutex_;
  std::condition_variable stream_ended_;
  std::shared_ptr<Stream> stream_;
  int num_streams_ = 0;  // not yet done
};

}  // namespace upipe::worker
