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
bool AppendWhole(const std::string& path, const std::string& text) {
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

RankRecorder::RankRecorder(int64_t log_segment_bytes) : log_segment_bytes_(log_segment_bytes) {
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
    const bool written = AppendWhole(line.path, line.text + "\n");
    if (!written && !losing_lines_) {
      UPIPE_LOG(WARNING) << "cannot append to " << line.path << ": " << std::strerror(errno)
                         << "; step records are lost until it can";
    }
    losing_lines_ = !written;
  }
}

void RankRecorder::KeepNewest(const std::string& root, size_t num) {
  std::lock_guard lock(mutex_);
  prune_ = {root,
            num};  // looked at when the thread next wakes: the log about to be opened wakes it
}

void RankRecorder::Prune() {
  std::pair<std::string, size_t> order;
  std::vector<std::string> open_dirs;
  {
    std::lock_guard lock(mutex_);
    order.swap(prune_);
    for (const auto& [key, pipe] : pipes_) open_dirs.push_back(pipe->dir);
  }
  if (order.first.empty()) return;
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> folders;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(order.first, error)) {
    const std::string prefix = entry.path().string() + "/";
    const bool in_use =
        std::any_of(open_dirs.begin(), open_dirs.end(),
                    [&](const std::string& dir) { return absl::StartsWith(dir, prefix); });
    if (!in_use) folders.emplace_back(entry.last_write_time(error), entry.path());
  }
  std::sort(folders.rbegin(), folders.rend());
  for (size_t i = order.second; i < folders.size(); ++i) {
    std::filesystem::remove_all(folders[i].second, error);
    if (error) {
      UPIPE_LOG(WARNING) << "cannot delete " << folders[i].second.string() << ": "
                         << error.message();
    }
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
    stopping = stopping_ && lines_.empty();
  }
}

}  // namespace upipe::worker
