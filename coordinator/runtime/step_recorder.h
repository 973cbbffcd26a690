// Keeps the step reports of every job's rank 0 in JOBS_DIR/JOB_ID/metrics.jsonl (docs/metrics.md),
// on a thread of its own: for people, never read by a decision, so neither a slow nor a full disk
// may hold one up.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "upipe/v1/report.pb.h"

namespace upipe::coordinator {

class StepRecorder {
 public:
  struct Options {
    std::string jobs_dir;        // made when missing
    int64_t min_free_bytes = 0;  // of the disk: below it nothing is written, the store needs it
    size_t max_waiting = 4096;   // reports of all jobs; beyond it the oldest is dropped
  };
  explicit StepRecorder(Options options);
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;
  // Writes what waits.
  ~StepRecorder();

  // Appends a line later. Thread-safe, never blocks. A step at or below the last one in the job's
  // file is not written again; a line says how many steps before it the file lacks.
  void Record(const std::string& job_id, v1::StepReport report);

 private:
  struct Waiting {
    std::string job_id;
    v1::StepReport report;
  };
  void Run();
  absl::Status Append(const std::string& job_id, const std::vector<v1::StepReport>& reports);
  absl::Status AppendTo(int fd, std::optional<int64_t>& last_step,
                        const std::vector<v1::StepReport>& reports) const;
  void Tell(const absl::Status& status, size_t num_reports);

  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  bool stopping_ = false;
  // The thread's own.
  std::map<std::string, std::optional<int64_t>> last_steps_;  // by job; absent: not read yet
  size_t num_lost_ = 0;                                       // since writing failed
  std::thread thread_;
};

}  // namespace upipe::coordinator
