#include "worker/launcher/rank_recorder.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <utility>

#include "absl/strings/match.h"
#include "common/check.h"
#include "common/log.h"

namespace upipe::worker {
namespace {

constexpr size_t kWaitingLinesMax = 4096;
constexpr size_t kDrainBytes = 256
                               << 10;  // per turn, so that one loud rank does not starve the others

// All of `text` or, with errno, nothing.
bool AppendWhole(const std::string& path, const std::string& text, int64_t bytes_max) {
  struct stat full;
  if (stat(path.c_str(), &full) == 0 &&
      full.st_size + static_cast<int64_t>(text.size()) > bytes_max) {
    rename(path.c_str(), (path + ".1").c_str());
  }
  const int fd = open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  struct stat before;
  const bool known = fstat(fd, &before) == 0;
  const ssize_t written = known ? write(fd, text.data(), text.size()) : -1;
  const bool whole = written == static_cast<ssize_t>(text.size());
  const int error = written < 0 ? errno : ENOSPC;
  if (known && !whole && ftruncate(fd, before.st_size) != 0) {
    UPIPE_LOG(WARNING) << path << " holds a torn line";
  }
  close(fd);
  errno = error;
  return whole;
}

struct Attempt {
  std::filesystem::file_time_type used;  // of its newest file
  std::filesystem::path path;
  int64_t bytes = 0;
};

// Of every attempt below `root`. What vanishes meanwhile is left out.
std::vector<Attempt> ListAttempts(const std::string& root) {
  namespace fs = std::filesystem;
  std::vector<Attempt> attempts;
  std::error_code error;
  for (const auto& job : fs::directory_iterator(root, error)) {
    for (const auto& generation : fs::directory_iterator(job, error)) {
      Attempt attempt{generation.last_write_time(error), generation.path()};
      for (const auto& file : fs::recursive_directory_iterator(generation, error)) {
        std::error_code gone;
        if (!file.is_regular_file(gone)) continue;
        const uintmax_t bytes = file.file_size(gone);
        if (!gone) attempt.bytes += static_cast<int64_t>(bytes);
        const auto written = file.last_write_time(gone);
        if (!gone) attempt.used = std::max(attempt.used, written);
      }
      attempts.push_back(std::move(attempt));
    }
  }
  return attempts;
}

}  // namespace

struct RankRecorder::Pipe {
  Pipe(int fd, const std::string& dir, int64_t segment_bytes)
      : fd(fd), dir(dir), log(dir, segment_bytes) {}
  ~Pipe() {
    if (fd >= 0) close(fd);
  }
  int fd;
  const std::string dir;
  RankLogWriter log;
  bool finishing = false;
  std::promise<std::vector<std::string>> tail;
};

RankRecorder::RankRecorder(int64_t log_segment_bytes, int64_t lines_bytes)
    : log_segment_bytes_(log_segment_bytes), lines_bytes_(lines_bytes) {
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  UPIPE_CHECK(wake_fd_ >= 0) << "eventfd: errno " << errno;
  thread_ = std::thread([this] { Run(); });
}

RankRecorder::~RankRecorder() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
  close(wake_fd_);
}

void RankRecorder::Wake() { eventfd_write(wake_fd_, 1); }

absl::StatusOr<int> RankRecorder::OpenLog(const RankKey& key, const std::string& dir) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return absl::ErrnoToStatus(errno, "cannot make an output pipe");
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  {
    std::lock_guard lock(mutex_);
    pipes_[key] = std::make_shared<Pipe>(ends[0], dir, log_segment_bytes_);
  }
  Wake();
  return ends[1];
}

std::vector<std::string> RankRecorder::FinishLog(const RankKey& key, absl::Duration patience) {
  std::future<std::vector<std::string>> tail;
  {
    std::lock_guard lock(mutex_);
    const auto found = pipes_.find(key);
    if (found == pipes_.end()) return {};
    found->second->finishing = true;
    tail = found->second->tail.get_future();
  }
  Wake();
  if (tail.wait_for(absl::ToChronoNanoseconds(patience)) != std::future_status::ready) {
    return {"(the log could not be read in time)"};
  }
  return tail.get();
}

void RankRecorder::AppendLine(const std::string& path, std::string line) {
  {
    std::lock_guard lock(mutex_);
    if (lines_.size() >= kWaitingLinesMax) return;
    lines_.push_back({path, std::move(line)});
  }
  Wake();
}

void RankRecorder::WriteLines() {
  std::vector<Line> lines;
  {
    std::lock_guard lock(mutex_);
    lines.swap(lines_);
  }
  for (const Line& line : lines) {
    const bool written = AppendWhole(line.path, line.text + "\n", lines_bytes_);
    if (!written && !losing_lines_) {
      UPIPE_LOG(WARNING) << "cannot append to " << line.path << ": " << std::strerror(errno)
                         << "; step records are lost until it can";
    }
    losing_lines_ = !written;
  }
}

void RankRecorder::KeepWithin(LogBudget budget, std::function<void(std::string job)> deleted) {
  {
    std::lock_guard lock(mutex_);
    prune_ = std::move(budget);
    deleted_ = std::move(deleted);
  }
  Wake();
}

void RankRecorder::Prune() {
  std::optional<LogBudget> budget;
  std::function<void(std::string)> deleted;
  std::vector<std::string> open_dirs;
  {
    std::lock_guard lock(mutex_);
    if (!prune_.has_value()) return;
    budget.swap(prune_);
    deleted = deleted_;
    for (const auto& [key, pipe] : pipes_) open_dirs.push_back(pipe->dir);
  }
  std::vector<Attempt> attempts = ListAttempts(budget->root);
  std::erase_if(attempts, [&](const Attempt& attempt) {
    const std::string prefix = attempt.path.string() + "/";
    return std::any_of(open_dirs.begin(), open_dirs.end(),
                       [&](const std::string& dir) { return absl::StartsWith(dir, prefix); });
  });
  std::sort(attempts.begin(), attempts.end(),
            [](const Attempt& a, const Attempt& b) { return a.used > b.used; });
  int64_t bytes = 0;
  size_t kept = 0;
  for (const Attempt& attempt : attempts) {
    bytes += attempt.bytes;
    if (++kept <= budget->attempts && bytes <= budget->bytes) continue;
    std::error_code error;
    std::filesystem::remove_all(attempt.path, error);
    if (error) {
      UPIPE_LOG(WARNING) << "cannot delete " << attempt.path.string() << ": " << error.message();
    }
    const std::filesystem::path job = attempt.path.parent_path();
    // Refused while another attempt of the job is there.
    if (rmdir(job.c_str()) == 0 && deleted) deleted(job.filename().string());
  }
}

// False when the pipe is at its end (every writer closed it) or empty.
bool RankRecorder::Drain(Pipe& pipe, bool to_the_end) {
  char buffer[16 << 10];
  size_t taken = 0;
  while (to_the_end ? taken < 8 * kDrainBytes : taken < kDrainBytes) {
    const ssize_t got = read(pipe.fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) {
      close(std::exchange(pipe.fd, -1));
      return false;
    }
    if (got < 0) return false;
    pipe.log.Write(buffer, static_cast<size_t>(got));
    taken += static_cast<size_t>(got);
  }
  return true;
}

void RankRecorder::Run() {
  std::vector<std::pair<RankKey, std::shared_ptr<Pipe>>> turn;
  std::vector<pollfd> polled;
  for (bool stopping = false; !stopping;) {
    polled.assign(1, {wake_fd_, POLLIN, 0});
    turn.clear();
    {
      std::lock_guard lock(mutex_);
      turn.assign(pipes_.begin(), pipes_.end());
    }
    for (const auto& [key, pipe] : turn) polled.push_back({pipe->fd, POLLIN, 0});  // -1 is ignored
    poll(polled.data(), polled.size(), -1);
    eventfd_t ignored;
    eventfd_read(wake_fd_, &ignored);
    for (const auto& [key, pipe] : turn) {
      bool finishing = false;
      {
        std::lock_guard lock(mutex_);
        finishing = pipe->finishing;
      }
      if (pipe->fd >= 0) Drain(*pipe, finishing);
      if (!finishing) continue;
      pipe->tail.set_value(pipe->log.Tail());
      std::lock_guard lock(mutex_);
      pipes_.erase(key);
    }
    WriteLines();
    Prune();
    std::lock_guard lock(mutex_);
    stopping = stopping_ && lines_.empty() && !prune_.has_value();
  }
}

}  // namespace upipe::worker
