// The files of lines that RankRecorder appends to (metrics.jsonl, timeline.jsonl), read as one run
// of bytes: what was turned over into `path`.1 first, then the file itself. Files stay open, so a
// reader keeps its place when the file is turned over while it reads.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {

// One thread.
class LineFileReader {
 public:
  explicit LineFileReader(std::string path) : path_(std::move(path)) {}
  LineFileReader(const LineFileReader&) = delete;
  LineFileReader& operator=(const LineFileReader&) = delete;
  ~LineFileReader();

  // Bytes from `offset`, which counts from the oldest byte that was there at the first call
  // (negative: from the end), at most `bytes_max`; no data at the end. NotFound when there is no
  // such file.
  absl::StatusOr<LogPiece> Read(int64_t offset, int64_t bytes_max);

 private:
  struct Part {
    int fd = -1;
    dev_t device = 0;
    ino_t inode = 0;
  };
  // Opens what is at `path` unless it is open already; false when nothing is there.
  absl::StatusOr<bool> Open(const std::string& path);
  absl::Status Refresh();

  const std::string path_;
  std::vector<Part> parts_;  // oldest first
  bool began_ = false;
};

}  // namespace upipe::worker
