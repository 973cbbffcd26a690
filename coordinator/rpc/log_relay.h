// Joins a client's Logs stream with the UploadLog stream its worker opens for it, one chunk at a
// time, so that a slow reader slows the worker and nothing piles up here; the coordinator's own
// files are sent by StepFiles.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/time/time.h"
#include "common/clock.h"
#include "coordinator/rpc/log_stream.h"
#include "coordinator/rpc/step_files.h"
#include "coordinator/runtime/loop.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::coordinator {

class LogRelay {
 public:
  // `step_folder`: where StepFiles finds the jobs' files.
  explicit LogRelay(std::string step_folder) : step_files_(std::move(step_folder)) {}
  // Starts a client's stream: asks the loop for the worker, and waits for its upload. `loop` may
  // end before this object, not the other way.
  grpc::ServerWriteReactor<v1::LogsResponse>* Open(const v1::LogsRequest& request, Loop& loop);
  // The worker's end of a stream.
  grpc::ServerReadReactor<v1::LogChunk>* Accept();
  // Ends streams whose worker did not come within `patience`.
  void Expire(BootTime now, absl::Duration patience);
  // Ends every stream.
  void End(const absl::Status& status);

  std::shared_ptr<LogStream> Find(const std::string& upload_id);

 private:
  void OpenStepFile(const v1::LogsRequest& request, const std::shared_ptr<LogStream>& stream,
                    Loop& loop);

  struct Waiting {
    std::shared_ptr<LogStream> stream;
    BootTime since;
  };
  std::mutex mutex_;
  std::map<std::string, Waiting> streams_;  // by upload id
  StepFiles step_files_;
};

}  // namespace upipe::coordinator
