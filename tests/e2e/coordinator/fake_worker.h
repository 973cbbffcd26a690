// A worker that speaks the Session protocol over real gRPC and runs no processes: its ranks obey at
// once, and leave at a step boundary when they are given a grace. The test sees every message and
// decides what ranks report.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/time/time.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::coordinator {

class FakeWorker {
 public:
  struct Options {
    std::string address;  // of the coordinator
    std::string name;
    std::string incarnation = "first";
    int slots = 2;
    int64_t memory_per_rank_bytes = 64 << 20;
    bool finish_when_met = true;  // ranks run one step and exit 0 once they have the address table
    bool break_logs_off = false;  // a log that is not followed ends without its last chunk
  };
  explicit FakeWorker(Options options);
  ~FakeWorker();

  // Ends rank `rank` of whatever job it runs here: EXITED with `report`'s exit, then GONE.
  void EndRank(int rank, int exit_code);
  // Rank 0 tells of a manifest in its place.
  void Commit(int64_t step);
  // The grace of the last StopRanks; none before.
  std::optional<absl::Duration> stop_grace() const;
  // The generation of the last StartRank; 0 before.
  int64_t generation() const;
  // The epoch of the last HelloAck; 0 before.
  int64_t epoch() const;
  int num_live() const;

 private:
  void Read();
  void Beat();
  void Handle(const v1::CoordinatorMessage& message);
  void Send(v1::WorkerMessage message);
  void Report(v1::RankReport& rank, v1::RankState state);
  void Finish(v1::RankReport& rank);
  // Three lines; a followed log stays open as long as this worker.
  void Upload(const v1::OpenLog& request);

  const Options options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::WorkerService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerMessage, v1::CoordinatorMessage>> stream_;
  mutable std::mutex mutex_;
  uint64_t sequence_ = 0;
  int64_t epoch_ = 0;
  int64_t generation_ = 0;
  std::optional<absl::Duration> stop_grace_;
  std::map<int, v1::RankReport> ranks_;  // by rank number
  struct Followed {
    grpc::ClientContext context;
    v1::UploadLogResponse response;
    std::unique_ptr<grpc::ClientWriter<v1::LogChunk>> writer;
  };
  std::list<Followed> followed_;
  std::condition_variable end_;
  bool ending_ = false;
  std::thread reader_;
  std::thread heart_;
};

}  // namespace upipe::coordinator
