// A rank's output on disk: a run of segments named by the offset of their first byte, of which the
// newest two stay. Offsets count from the first byte the rank ever wrote, those included that the
// disk did not take, so readers can tell what is missing.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace upipe::worker {

// One thread.
class RankLogWriter {
 public:
  RankLogWriter(std::string dir, int64_t segment_bytes)
      : dir_(std::move(dir)), segment_bytes_(segment_bytes) {}
  RankLogWriter(const RankLogWriter&) = delete;
  RankLogWriter& operator=(const RankLogWriter&) = delete;
  ~RankLogWriter();

  // Best effort: what the disk does not take is a gap in the log, and not lost to Tail.
  void Write(const char* data, size_t bytes);
  // The last lines, at most 20 of at most 512 characters.
  std::vector<std::string> Tail() const;  // UTF-8, whatever was written

 private:
  bool OpenSegment();
  void DropOldSegments();
  void KeepTail(const char* data, size_t bytes);

  const std::string dir_;
  const int64_t segment_bytes_;
  int fd_ = -1;
  std::string segment_path_;
  int64_t segment_begin_ = 0;
  std::optional<int64_t> end_;  // absent: what an earlier writer left was not looked at
  std::deque<std::string> tail_;
  std::string line_;
};

struct LogPiece {
  std::string data;
  int64_t offset = 0;  // of data's first byte
  std::string gap;     // why bytes before `offset` are missing
};

// Bytes from `offset` (negative: from the end), at most `bytes_max`; no data at the end. NotFound
// when the rank never wrote here or its log was deleted.
absl::StatusOr<LogPiece> ReadRankLog(const std::string& dir, int64_t offset, int64_t bytes_max);

}  // namespace upipe::worker
