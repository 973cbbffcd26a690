// Everything ranks write to the worker's disk: their output, drained from pipes, and their step
// records. One thread, so that a slow disk stalls neither the deciding thread nor the launcher.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/agent/rank_process.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {

class RankRecorder {
 public:
  explicit RankRecorder(int64_t log_segment_bytes = 8 << 20);
  RankRecorder(const RankRecorder&) = delete;
  RankRecorder& operator=(const RankRecorder&) = delete;
  ~RankRecorder();

  // The write end (close-on-exec, the caller's to close) of a pipe drained into the log in `dir`.
  absl::StatusOr<int> OpenLog(const RankKey& key, const std::string& dir);

  // Takes what is in the pipe now, closes it and returns the last lines. Waits at most `patience`:
  // a writer that escaped may hold the pipe open for ever, and a disk may hang.
  std::vector<std::string> FinishLog(const RankKey& key, absl::Duration patience);

  // Appends one line to `path` later; dropped when 4,096 lines wait. Never blocks on the disk.
  void AppendLine(const std::string& path, std::string line);

  // Later deletes all but the `num` newest folders in `root` that hold no open log.
  void KeepNewest(const std::string& root, size_t num);

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
  int wake_fd_ = -1;
  std::mutex mutex_;
  std::map<RankKey, std::shared_ptr<Pipe>> pipes_;
  std::vector<Line> lines_;
  std::pair<std::string, size_t> prune_;  // root, how many to keep; empty root: nothing to do
  bool stopping_ = false;
  bool losing_lines_ = false;  // recorder thread: the last line could not be written
  std::thread thread_;
};

}  // namespace upipe::worker
