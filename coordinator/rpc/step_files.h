// Serves the coordinator's own files of steps (STATE_DIR/jobs/JOB_ID/metrics.jsonl): a thread per
// reader, few at a time, so that neither a slow reader nor a slow disk holds up a reactor.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "coordinator/rpc/log_stream.h"

namespace upipe::coordinator {

class StepFiles {
 public:
  // `folder` is the recorder's (coordinator/runtime/step_recorder.h).
  explicit StepFiles(std::string folder) : folder_(std::move(folder)) {}
  StepFiles(const StepFiles&) = delete;
  StepFiles& operator=(const StepFiles&) = delete;
  // Waits for the readers: their streams must have ended.
  ~StepFiles();

  // Sends the file of an existing job from `offset` (negative: from the end) as it is now, then
  // ends `stream`: NotFound when no step was recorded, Unavailable when too many read already.
  // Thread-safe, never blocks.
  void Send(std::shared_ptr<LogStream> stream, const std::string& job_id, int64_t offset);

 private:
  struct Reader {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> done = std::make_shared<std::atomic<bool>>(false);
  };
  void Run(LogStream& stream, const std::string& job_id, int64_t offset) const;

  const std::string folder_;
  std::mutex mutex_;
  std::list<Reader> readers_;
};

}  // namespace upipe::coordinator
