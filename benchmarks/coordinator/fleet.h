// Thousands of workers of one process: each a real Session stream over gRPC that says hello, beats,
// obeys StartRank and Peers at once and runs nothing, and comes back with the worker's own
// back-off.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::bench {

class LoadWorker;

class Fleet {
 public:
  struct Options {
    std::string address;  // of the coordinator
    int workers = 1;
    int slots = 8;                // of each
    int streams_per_channel = 1;  // a worker has a connection of its own
    absl::Duration heartbeat;
  };
  explicit Fleet(Options options);
  ~Fleet();  // closes every stream

  // Workers that are away close their streams and stay so.
  void SetAway(bool away) { away_ = away; }

  // Workers whose session was acknowledged at `epoch` or a later one and is open.
  int NumAcknowledged(int64_t epoch) const;
  int64_t epoch() const { return epoch_; }  // the latest one heard
  int64_t NumRunning() const;               // ranks
  // Sessions that ended, and orders to stop ranks, since the start: this benchmark gives none.
  int64_t num_ended() const { return num_ended_; }
  int64_t num_stops() const { return num_stops_; }
  // From the call of Write to the acknowledgement, of heartbeats acknowledged since the last call.
  std::vector<double> TakeAckSeconds();

 private:
  friend class LoadWorker;
  void Run();

  const Options options_;
  std::vector<std::unique_ptr<v1::WorkerService::Stub>> stubs_;
  std::vector<std::unique_ptr<LoadWorker>> workers_;
  std::atomic<bool> away_ = false;
  std::atomic<bool> ending_ = false;
  std::atomic<int64_t> epoch_ = 0;
  std::atomic<int64_t> num_ended_ = 0;
  std::atomic<int64_t> num_stops_ = 0;
  std::mutex mutex_;
  std::vector<double> ack_seconds_;
  std::thread thread_;
};

}  // namespace upipe::bench
