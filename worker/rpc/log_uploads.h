// Sends the files of ranks to the coordinator, logs above all, one stream and one thread per
// request, so that a slow reader stalls nothing.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::worker {

class LogUploads {
 public:
  explicit LogUploads(std::shared_ptr<grpc::Channel> channel);
  LogUploads(const LogUploads&) = delete;
  LogUploads& operator=(const LogUploads&) = delete;
  // Cancels what runs and waits for it.
  ~LogUploads();

  // Uploads the asked file of the rank whose folder is `dir` from the asked offset. With follow
  // until `live` (thread-safe) is false and everything is sent. At most 16 at a time: the
  // seventeenth is told so. Never blocks.
  void Start(const v1::OpenLog& request, const std::string& dir, std::function<bool()> live);

 private:
  struct Upload;
  void Run(Upload& upload);
  void Send(Upload& upload, grpc::ClientWriterInterface<v1::LogChunk>& writer);

  std::unique_ptr<v1::WorkerService::Stub> stub_;
  std::mutex mutex_;
  std::list<Upload> uploads_;
};

}  // namespace upipe::worker
