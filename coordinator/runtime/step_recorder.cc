#include "coordinator/runtime/step_recorder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/log.h"
#include "common/metrics/step_line.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::coordinator {
namespace {

constexpr int64_t kTailBytes = 1 << 20;  // many lines

absl::Status DiskError(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("cannot ", what, ": ", std::strerror(errno)));
}

absl::StatusOr<std::string> ReadTail(int fd, int64_t size) {
  std::string tail(std::min(size, kTailBytes), '\0');
  const auto begin = size - static_cast<int64_t>(tail.size());
  for (size_t done = 0; done < tail.size();) {
    const ssize_t got = pread(fd, tail.data() + done, tail.size() - done,
                              static_cast<off_t>(begin + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return DiskError("read it");
    done += static_cast<size_t>(got);
  }
  return tail;
}

// The step of the last whole line, 0 without one. A line that a dying writer left unfinished is cut
// off.
absl::StatusOr<int64_t> LastStep(int fd) {
  struct stat file;
  if (fstat(fd, &file) != 0) return DiskError("stat it");
  UPIPE_ASSIGN_OR_RETURN(std::string tail, ReadTail(fd, file.st_size));
  const size_t whole = tail.rfind('\n') + 1;  // npos + 1 = 0
  if (whole < tail.size()) {
    if (ftruncate(fd, file.st_size - static_cast<off_t>(tail.size() - whole)) != 0) {
      return DiskError("cut off its unfinished last line");
    }
    tail.resize(whole);
  }
  const std::vector<absl::string_view> lines = absl::StrSplit(tail, '\n', absl::SkipEmpty());
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
    const absl::StatusOr<StepLine> read = ParseStepLine(*line);
    if (read.ok()) return read->report.step();
  }
  return 0;
}

// All of `text` or nothing.
absl::Status WriteWhole(int fd, const std::string& text) {
  const off_t before = lseek(fd, 0, SEEK_END);
  for (size_t done = 0; done < text.size();) {
    const ssize_t wrote = write(fd, text.data() + done, text.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) {
      const absl::Status error = DiskError("write");
      if (done > 0 && ftruncate(fd, before) != 0) return DiskError("cut off half a line");
      return error;
    }
    done += static_cast<size_t>(wrote);
  }
  return absl::OkStatus();
}

}  // namespace

StepRecorder::StepRecorder(Options options) : options_(std::move(options)) {
  thread_ = std::thread([this] { Run(); });
}

StepRecorder::~StepRecorder() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StepRecorder::Record(const std::string& job_id, v1::StepReport report) {
  {
    std::lock_guard lock(mutex_);
    if (waiting_.size() >= options_.max_waiting) waiting_.pop_front();
    waiting_.push_back({job_id, std::move(report)});
  }
  changed_.notify_one();
}

void StepRecorder::Run() {
  std::deque<Waiting> taken;
  while (true) {
    taken.clear();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      taken.swap(waiting_);
    }
    std::map<std::string, std::vector<v1::StepReport>> by_job;
    for (Waiting& item : taken) by_job[item.job_id].push_back(std::move(item.report));
    for (const auto& [job_id, reports] : by_job) Tell(Append(job_id, reports), reports.size());
  }
}

absl::Status StepRecorder::Append(const std::string& job_id,
                                  const std::vector<v1::StepReport>& reports) {
  const std::string dir = absl::StrCat(options_.jobs_dir, "/", job_id);
  const std::string path = dir + "/metrics.jsonl";
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return DiskError(absl::StrCat("open ", path));
  const absl::Status status = AppendTo(fd, last_steps_[job_id], reports);
  close(fd);
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status StepRecorder::AppendTo(int fd, std::optional<int64_t>& last_step,
                                    const std::vector<v1::StepReport>& reports) const {
  struct statvfs disk;
  if (fstatvfs(fd, &disk) != 0) return DiskError("read the disk's free space");
  const int64_t free_bytes =
      static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  if (free_bytes < options_.min_free_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the disk has ", FormatBytes(free_bytes), " free and metrics leave ",
                     FormatBytes(options_.min_free_bytes), " to the store"));
  }
  if (!last_step.has_value()) {
    UPIPE_ASSIGN_OR_RETURN(last_step, LastStep(fd));
  }
  std::string text;
  int64_t last = *last_step;
  for (const v1::StepReport& report : reports) {
    if (report.step() <= last) continue;
    absl::StrAppend(
        &text, FormatStepLine({.missing_steps = report.step() - last - 1, .report = report}), "\n");
    last = report.step();
  }
  const absl::Status written = WriteWhole(fd, text);
  last_step.reset();  // after a failure the file is read again: half a line may have stayed
  if (written.ok()) last_step = last;
  return written;
}

// One warning when writing begins to fail, one line when it works again.
void StepRecorder::Tell(const absl::Status& status, size_t num_reports) {
  if (!status.ok()) {
    if (num_lost_ == 0) {
      UPIPE_LOG(WARNING) << "step reports are lost: " << status.message();
    }
    num_lost_ += num_reports;
  } else if (num_lost_ > 0) {
    UPIPE_LOG(INFO) << "step reports are written again; " << num_lost_ << " were lost";
    num_lost_ = 0;
  }
}

}  // namespace upipe::coordinator
