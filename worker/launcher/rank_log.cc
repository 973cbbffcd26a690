#include "worker/launcher/rank_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <utility>

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

int64_t EndOf(const std::map<int64_t, Segment>& segments) {
  return segments.empty() ? 0 : segments.rbegin()->first + segments.rbegin()->second.bytes;
}

}  // namespace

RankLogWriter::~RankLogWriter() {
  // Bytes lost at the end: an empty segment says where it would be.
  if (fd_ < 0 && end_.has_value() && *end_ > segment_begin_) OpenSegment();
  if (fd_ < 0) return;
  fdatasync(fd_);
  close(fd_);
}

bool RankLogWriter::OpenSegment() {
  if (fd_ >= 0) close(fd_);
  segment_begin_ = *end_;
  segment_path_ = SegmentPath(dir_, segment_begin_);
  fd_ = open(segment_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  return fd_ >= 0;
}

void RankLogWriter::DropOldSegments() {
  std::map<int64_t, Segment> segments = ListSegments(dir_);
  while (segments.size() > 2) {
    unlink(segments.begin()->second.path.c_str());
    segments.erase(segments.begin());
  }
}

void RankLogWriter::Write(const char* data, size_t bytes) {
  KeepTail(data, bytes);
  if (!end_.has_value()) end_ = EndOf(ListSegments(dir_));
  const bool opened = fd_ < 0 || *end_ - segment_begin_ >= segment_bytes_;
  if (opened) OpenSegment();
  size_t done = 0;
  while (done < bytes && fd_ >= 0) {
    const ssize_t written = write(fd_, data + done, bytes - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {  // what comes later goes behind a gap
      close(std::exchange(fd_, -1));
      if (opened && done == 0) unlink(segment_path_.c_str());
      break;
    }
    done += static_cast<size_t>(written);
  }
  *end_ += static_cast<int64_t>(bytes);
  if (opened && fd_ >= 0) DropOldSegments();
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
  const int64_t end = EndOf(segments);
  LogPiece piece;
  piece.offset = offset < 0 ? std::max(begin, end + offset) : std::min(offset, end);
  if (piece.offset < begin) {
    piece.gap = absl::StrCat("bytes ", piece.offset, " to ", begin,
                             " are gone: older log segments were dropped");
    piece.offset = begin;
  }
  auto segment = std::prev(segments.upper_bound(piece.offset));
  if (piece.offset >= segment->first + segment->second.bytes) {
    const auto next = std::next(segment);
    if (next == segments.end()) return piece;
    if (piece.offset < next->first) {
      piece.gap = absl::StrCat("bytes ", piece.offset, " to ", next->first,
                               " are missing: the worker's disk did not take them");
      piece.offset = next->first;
    }
    segment = next;
    if (segment->second.bytes == 0) return piece;
  }
  const int64_t left = segment->first + segment->second.bytes - piece.offset;
  const int fd = open(segment->second.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 && errno == ENOENT)
    return ReadRankLog(dir, piece.offset, bytes_max);  // dropped meanwhile: a newer one exists
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", segment->second.path));
  piece.data.resize(static_cast<size_t>(std::min(left, bytes_max)));
  const ssize_t got =
      pread(fd, piece.data.data(), piece.data.size(), piece.offset - segment->first);
  const int error = errno;
  close(fd);
  if (got < 0)
    return absl::ErrnoToStatus(error, absl::StrCat("cannot read ", segment->second.path));
  piece.data.resize(static_cast<size_t>(got));
  return piece;
}

}  // namespace upipe::worker
