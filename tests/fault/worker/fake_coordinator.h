// A coordinator that only listens, acknowledges and passes on what a test says.
#pragma once

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::worker {

class FakeCoordinator : public v1::WorkerService::Service {
 public:
  explicit FakeCoordinator(const std::string& address = "127.0.0.1:0");
  ~FakeCoordinator() override;

  std::string address() const { return address_; }
  void set_epoch(int64_t epoch) { epoch_ = epoch; }
  void set_acknowledge_ranks(bool on) { acknowledge_ranks_ = on; }

  // Waits until `met` holds over what was heard; false after 15 s.
  bool WaitUntil(const std::function<bool()>& met);
  bool WaitForState(int rank, v1::RankState state, int64_t generation = 1);

  // Everything heard, guarded: call inside WaitUntil or after it.
  std::vector<v1::Hello> hellos;
  std::map<std::pair<int64_t, int>, v1::RankReport> ranks;  // newest by (generation, rank)
  std::map<std::pair<int64_t, int>, std::vector<v1::RankState>> states;  // changes, in order
  std::map<int, v1::StepReport> progress;
  std::map<std::pair<int64_t, int>, v1::RankPosition> positions;  // of the last heartbeat
  bool leaving = false;                                           // of the last heartbeat
  std::vector<v1::SlotDevice> devices;                            // of the last heartbeat
  std::map<std::string, std::string> logs;                        // by request id
  std::map<std::string, bool> logs_ended;
  std::map<std::string, bool> logs_complete;

  void Send(const v1::CoordinatorMessage& message);
  void Start(const std::string& mode, int64_t generation, const std::string& nonce, int rank,
             int slot, int num_ranks);
  void Start(const v1::RunPlan& plan, int64_t generation, const std::string& nonce, int rank,
             int slot);
  void SendPeers(int64_t generation, const std::string& nonce, int64_t resume_step = 0);
  void Retain(int64_t generation, const std::string& nonce, int keep);
  void Stop(int64_t generation, const std::string& nonce, int64_t grace_millis);
  void OpenLog(const std::string& request_id, int64_t generation, int rank, int64_t offset,
               bool follow, v1::RankFile file = v1::RANK_FILE_UNSPECIFIED);

 private:
  using SessionStream = grpc::ServerReaderWriter<v1::CoordinatorMessage, v1::WorkerMessage>;
  grpc::Status Session(grpc::ServerContext* context, SessionStream* stream) override;
  grpc::Status UploadLog(grpc::ServerContext* context, grpc::ServerReader<v1::LogChunk>* reader,
                         v1::UploadLogResponse* response) override;
  void Hear(const v1::WorkerMessage& message, SessionStream* stream);
  v1::Fence MakeFence(int64_t generation, const std::string& nonce) const;

  std::string address_;
  int64_t epoch_ = 1;
  bool acknowledge_ranks_ = true;
  std::mutex mutex_;
  std::condition_variable changed_;
  SessionStream* stream_ = nullptr;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace upipe::worker
