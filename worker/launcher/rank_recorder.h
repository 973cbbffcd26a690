// Everything ranks write to the worker's disk: their output, drained from pipes, and their step
// records. One thread, so that a slow disk stalls neither the deciding thread nor the launcher.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/agent/rank_process.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {

// What attempts (`root`/JOB/gGENERATION) may keep on disk.
struct LogBudget {
  std::string root;
  int64_t bytes = 0;  // of those without an open log
  size_t attempts = 0;
};

class RankRecorder {
 public:
  explicit RankRecorder(int64_t log_segment_bytes = 8 << 20, int64_t lines_bytes = 64 << 20);
  RankRecorder(const RankRecorder&) = delete;
  RankRecorder& operator=(const RankRecorder&) = delete;
  ~RankRecorder();

  // The write end (close-on-exec, the caller's to close) of a pipe drained into the log in `dir`.
  absl::StatusOr<int> OpenLog(const RankKey& key, const std::string& dir);

  // Takes what is in the pipe now, closes it and returns the last lines. Waits at most `patience`:
  // a writer that escaped may hold the pipe open for ever, and a disk may hang.
  std::vector<std::string> FinishLog(const RankKey& key, absl::Duration patience);

  // Appends one line to `path` later; dropped when 4,096 lines wait. Never blocks on the disk. A
  // file that would outgrow its bound is renamed to `path`.1 first, in the place of an older one.
  void AppendLine(const std::string& path, std::string line);

  // Later deletes the oldest attempts without an open log until the rest is within `budget`, and
  // tells `deleted` (recorder thread; must not block) of each job whose last one went.
  void KeepWithin(LogBudget budget, std::function<void(std::string job)> deleted);

 private:
  struct Pipe;
  struct Line {
    std::string path;
    std::string text;
  };
  void Run();
  void WriteLines();
  void Prune();
  bool Drain(Pipe& pipe, bool to_the_end);
  void Wake();

  const int64_t log_segment_bytes_;
  const int64_t lines_bytes_;
  int wake_fd_ = -1;
  std::mutex mutex_;
  std::map<RankKey, std::shared_ptr<Pipe>> pipes_;
  std::vector<Line> lines_;
  std::optional<LogBudget> prune_;  // to be looked at
  std::function<void(std::string)> deleted_;
  bool stopping_ = false;
  bool losing_lines_ = false;  // recorder thread: the last line could not be written
  std::thread thread_;
};

}  // namespace upipe::worker
