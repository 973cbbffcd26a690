#include "worker/launcher/rank_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/utf8.h"

namespace upipe::worker {
namespace {

constexpr size_t kTailLines = 20;
constexpr size_t kLineCharacters = 512;

std::string SegmentPath(const std::string& dir, int64_t begin) {
  return absl::StrFormat("%s/log.%020d", dir, begin);
}

struct Segment {
  std::string path;
  int64_t bytes = 0;
};

std::map<int64_t, Segment> ListSegments(const std::string& dir) {
  std::map<int64_t, Segment> segments;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    absl::string_view digits = name;
    int64_t begin = 0;
    if (!absl::ConsumePrefix(&digits, "log.") || !absl::SimpleAtoi(digits, &begin)) continue;
    struct stat info;
    if (stat(entry.path().c_str(), &info) == 0)
      segments[begin] = {entry.path().string(), info.st_size};
  }
  return segments;
}

}  // namespace

RankLogWriter::~RankLogWriter() {
  if (fd_ >= 0) close(fd_);
}

void RankLogWriter::OpenSegment() {
  if (fd_ >= 0) close(fd_);
  segment_begin_ = end_;
  fd_ = open(SegmentPath(dir_, segment_begin_).c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC,
             0600);
  std::map<int64_t, Segment> segments = ListSegments(dir_);
  while (segments.size() > 2) {
    unlink(segments.begin()->second.path.c_str());
    segments.erase(segments.begin());
  }
}

void RankLogWriter::Write(const char* data, size_t bytes) {
  if (fd_ < 0 || end_ - segment_begin_ >= segment_bytes_) OpenSegment();
  KeepTail(data, bytes);
  while (bytes > 0 && fd_ >= 0) {
    const ssize_t written = write(fd_, data, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    data += written;
    bytes -= static_cast<size_t>(written);
    end_ += written;
  }
}

void RankLogWriter::KeepTail(const char* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    if (data[i] != '\n') {
      if (line_.size() < kLineCharacters) line_ += data[i];
      continue;
    }
    tail_.push_back(std::move(line_));
    line_.clear();
    if (tail_.size() > kTailLines) tail_.pop_front();
  }
}

std::vector<std::string> RankLogWriter::Tail() const {
  std::vector<std::string> lines(tail_.begin(), tail_.end());
  if (!line_.empty()) lines.push_back(line_);
  if (lines.size() > kTailLines) lines.erase(lines.begin());
  for (std::string& line : lines) line = ToUtf8(line, kLineCharacters);
  return lines;
}

absl::StatusOr<LogPiece> ReadRankLog(const std::string& dir, int64_t offset, int64_t bytes_max) {
  const std::map<int64_t, Segment> segments = ListSegments(dir);
  if (segments.empty()) return absl::NotFoundError("this worker holds no log of that rank");
  const int64_t begin = segments.begin()->first;
  const int64_t end = segments.rbegin()->first + segments.rbegin()->second.bytes;
  LogPiece piece;
  piece.offset = offset < 0 ? std::max(begin, end + offset) : std::min(offset, end);
  if (piece.offset < begin) {
    piece.gap = absl::StrCat("bytes ", piece.offset, " to ", begin,
                             " are gone: older log segments were dropped");
    piece.offset = begin;
  }
  const auto segment = std::prev(segments.upper_bound(piece.offset));
  const int64_t left = segment->first + segment->second.bytes - piece.offset;
  if (left <= 0) return piece;
  const int fd = open(segment->second.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    return ReadRankLog(dir, piece.offset, bytes_max);  // dropped meanwhile: a newer one exists
  piece.data.resize(static_cast<size_t>(std::min(left, bytes_max)));
  const ssize_t got =
      pread(fd, piece.data.data(), piece.data.size(), piece.offset - segment->first);
  close(fd);
  piece.data.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return piece;
}

}  // namespace upipe::worker
