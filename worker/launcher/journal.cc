#include "worker/launcher/journal.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/status.h"

namespace upipe::worker {
namespace {

absl::Status WriteAll(int fd, const std::string& text) {
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t written = write(fd, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::ErrnoToStatus(errno, "write failed");
    done += static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

absl::Status SyncFolder(const std::string& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", folder));
  const int result = fsync(fd);
  const int error = errno;
  close(fd);
  return result == 0 ? absl::OkStatus()
                     : absl::ErrnoToStatus(error, absl::StrCat("cannot sync ", folder));
}

std::string StartLine(const JournalEntry& entry) {
  return absl::StrCat("start ", entry.job, " ", entry.generation, " ", entry.key.nonce, " ",
                      entry.key.rank, " ", entry.cgroup.empty() ? "-" : entry.cgroup);
}

std::string PidLine(const RankKey& key, const ProcessId& process, const std::string& boot) {
  return absl::StrCat("pid ", key.nonce, " ", key.rank, " ", process.pid, " ", process.start_ticks,
                      " ", boot);
}

std::string OpenedLine(const std::string& state_id, int64_t start_number) {
  return absl::StrCat("opened ", state_id, " ", start_number);
}

constexpr int64_t kRewriteBytes = 1 << 20;

}  // namespace

absl::StatusOr<Journal> Journal::Open(const std::string& state_dir) {
  const std::string lock_path = absl::StrCat(state_dir, "/lock");
  const int lock_fd = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock_fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", lock_path));
  Journal journal(absl::StrCat(state_dir, "/journal"), lock_fd);
  if (flock(lock_fd, LOCK_EX | LOCK_NB) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("another worker uses ", state_dir, "; give each worker its own --state-dir"));
  }
  UPIPE_RETURN_IF_ERROR(journal.Replay());
  journal.fd_ = open(journal.path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (journal.fd_ < 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", journal.path_));
  if (ftruncate(journal.fd_, journal.whole_bytes_) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot cut the torn end of ", journal.path_));
  }
  UPIPE_RETURN_IF_ERROR(SyncFolder(state_dir));
  if (journal.state_id_.empty()) journal.state_id_ = RandomNonce();
  UPIPE_RETURN_IF_ERROR(
      journal.Append(OpenedLine(journal.state_id_, journal.start_number_ + 1), true));
  return journal;
}

Journal::Journal(Journal&& other) noexcept
    : path_(std::move(other.path_)),
      lock_fd_(std::exchange(other.lock_fd_, -1)),
      fd_(std::exchange(other.fd_, -1)),
      whole_bytes_(other.whole_bytes_),
      rewritten_bytes_(other.rewritten_bytes_),
      failed_(other.failed_),
      state_id_(std::move(other.state_id_)),
      start_number_(other.start_number_),
      entries_(std::move(other.entries_)),
      generations_(std::move(other.generations_)) {}

Journal::~Journal() {
  if (fd_ >= 0) close(fd_);
  if (lock_fd_ >= 0) close(lock_fd_);
}

absl::Status Journal::Replay() {
  std::ifstream file(path_, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', begin)) {
    UPIPE_RETURN_IF_ERROR(ApplyLine(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  whole_bytes_ = static_cast<int64_t>(begin);
  return absl::OkStatus();
}

absl::Status Journal::ApplyLine(const std::string& line) {
  const std::vector<std::string> words = absl::StrSplit(line, ' ');
  const absl::Status unreadable =
      absl::DataLossError(absl::StrCat(path_, " holds an unreadable line: '", line, "'"));
  const auto find = [this](const RankKey& key) {
    return std::find_if(entries_.begin(), entries_.end(),
                        [&](const auto& entry) { return entry.key == key; });
  };
  JournalEntry entry;
  const auto rank_in = [&](const std::string& word) {
    return absl::SimpleAtoi(word, &entry.key.rank) && entry.key.rank >= 0;
  };
  if (words[0] == "start" && words.size() == 6 && absl::SimpleAtoi(words[2], &entry.generation) &&
      rank_in(words[4])) {
    entry.job = words[1];
    entry.key.nonce = words[3];
    if (words[5] != "-") entry.cgroup = words[5];
    int64_t& newest = generations_[entry.job];
    newest = std::max(newest, entry.generation);
    entries_.push_back(entry);
  } else if (words[0] == "opened" && words.size() == 3 &&
             absl::SimpleAtoi(words[2], &start_number_) && start_number_ >= 1) {
    state_id_ = words[1];
  } else if (words[0] == "fence" && words.size() == 3 &&
             absl::SimpleAtoi(words[2], &entry.generation)) {
    int64_t& newest = generations_[words[1]];
    newest = std::max(newest, entry.generation);
  } else if (words[0] == "pid" && words.size() == 6 && rank_in(words[2]) &&
             absl::SimpleAtoi(words[3], &entry.process.pid) && entry.process.pid > 0 &&
             absl::SimpleAtoi(words[4], &entry.process.start_ticks)) {
    entry.key.nonce = words[1];
    if (const auto found = find(entry.key); found != entries_.end()) {
      found->process = entry.process;
      found->boot = words[5];
    }
  } else if (words[0] == "gone" && words.size() == 3 && rank_in(words[2])) {
    entry.key.nonce = words[1];
    if (const auto found = find(entry.key); found != entries_.end()) entries_.erase(found);
  } else {
    return unreadable;
  }
  return absl::OkStatus();
}

absl::Status Journal::Forget(const std::optional<std::set<std::string>>& jobs) {
  entries_.clear();
  if (jobs.has_value()) {
    std::erase_if(generations_, [&](const auto& entry) { return !jobs->contains(entry.first); });
  }
  return Rewrite();
}

absl::Status Journal::Rewrite() {
  std::string text = absl::StrCat(OpenedLine(state_id_, start_number_), "\n");
  for (const auto& [job, generation] : generations_)
    absl::StrAppend(&text, "fence ", job, " ", generation, "\n");
  for (const JournalEntry& entry : entries_) {
    absl::StrAppend(&text, StartLine(entry), "\n");
    if (entry.process.pid != 0)
      absl::StrAppend(&text, PidLine(entry.key, entry.process, entry.boot), "\n");
  }
  const std::string next = path_ + ".next";
  const int fd = open(next.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", next));
  absl::Status status = WriteAll(fd, text);
  if (status.ok() && fsync(fd) != 0) status = absl::ErrnoToStatus(errno, "cannot sync the journal");
  if (status.ok() && rename(next.c_str(), path_.c_str()) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", next));
  }
  if (!status.ok()) {
    close(fd);
    return status;
  }
  close(std::exchange(fd_, fd));
  whole_bytes_ = rewritten_bytes_ = static_cast<int64_t>(text.size());
  status = SyncFolder(path_.substr(0, path_.rfind('/')));
  failed_ |= !status.ok();  // after a power loss the old file could be back
  return status;
}

absl::Status Journal::Append(const std::string& line, bool sync) {
  if (failed_)
    return absl::DataLossError(
        absl::StrCat("an earlier write to ", path_, " failed; restart the worker"));
  if (absl::Status status = WriteAll(fd_, line + "\n"); !status.ok()) {
    failed_ = ftruncate(fd_, whole_bytes_) != 0;
    return absl::Status(status.code(), absl::StrCat("cannot write ", path_, ": ", status.message(),
                                                    "; make room on its disk"));
  }
  whole_bytes_ += static_cast<int64_t>(line.size()) + 1;
  if (sync && fdatasync(fd_) != 0) {
    failed_ = true;
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot sync ", path_));
  }
  UPIPE_RETURN_IF_ERROR(ApplyLine(line));
  if (whole_bytes_ < std::max(kRewriteBytes, 4 * rewritten_bytes_)) return absl::OkStatus();
  rewritten_bytes_ = whole_bytes_;  // should it fail, not at each line again: the old file stays
  if (absl::Status status = Rewrite(); !status.ok()) {
    UPIPE_LOG(WARNING) << "the journal stays long: " << status.ToString();
  }
  return absl::OkStatus();
}

absl::Status Journal::AppendStart(const JournalEntry& entry) {
  return Append(StartLine(entry), true);
}

absl::Status Journal::AppendPid(const RankKey& key, const ProcessId& process) {
  return Append(PidLine(key, process, BootId()), false);
}

absl::Status Journal::AppendFence(const std::string& job, int64_t generation) {
  return Append(absl::StrCat("fence ", job, " ", generation), true);
}

absl::Status Journal::AppendGone(const RankKey& key) {
  return Append(absl::StrCat("gone ", key.nonce, " ", key.rank), true);
}

}  // namespace upipe::worker
