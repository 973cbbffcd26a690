#include "coordinator/rpc/step_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kReadersMax = 8;
constexpr int64_t kChunkBytes = 64 << 10;

// Hands chunks to a stream and waits until each is written.
class ChunkWriter {
 public:
  explicit ChunkWriter(LogStream& stream) : stream_(stream) {}

  // False: the client has left.
  bool Attach() {
    return stream_.Attach([state = state_] { state->Set(&State::left); });
  }
  bool Write(const v1::LogChunk& chunk) {
    {
      std::lock_guard lock(state_->mutex);
      state_->written = false;
    }
    if (!stream_.Write(chunk, [state = state_] { state->Set(&State::written); })) return false;
    std::unique_lock lock(state_->mutex);
    state_->changed.wait(lock, [this] { return state_->written || state_->left; });
    return state_->written;
  }

 private:
  struct State {
    void Set(bool State::*flag) {
      std::lock_guard lock(mutex);
      this->*flag = true;
      changed.notify_all();
    }
    std::mutex mutex;
    std::condition_variable changed;
    bool written = false;
    bool left = false;
  };
  LogStream& stream_;
  // The stream's callbacks may outlive this object.
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

StepFiles::~StepFiles() {
  for (Reader& reader : readers_) reader.thread.join();
}

void StepFiles::Send(std::shared_ptr<LogStream> stream, const std::string& job_id, int64_t offset) {
  std::lock_guard lock(mutex_);
  for (auto it = readers_.begin(); it != readers_.end();) {
    if (!it->done->load()) {
      ++it;
      continue;
    }
    it->thread.join();
    it = readers_.erase(it);
  }
  if (readers_.size() >= kReadersMax) {
    return stream->End(RpcError(
        Reason::kLogUnreadable,
        absl::StrCat(kReadersMax, " files of steps are being read already; try again later")));
  }
  Reader& reader = readers_.emplace_back();
  reader.thread =
      std::thread([this, job_id, offset, stream = std::move(stream), done = reader.done]() mutable {
        Run(*stream, job_id, offset);
        stream.reset();
        done->store(true);
      });
}

void StepFiles::Run(LogStream& stream, const std::string& job_id, int64_t offset) const {
  ChunkWriter writer(stream);
  if (!writer.Attach()) return;
  const std::string path = absl::StrCat(folder_, "/", job_id, "/metrics.jsonl");
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0) {
    const int error = errno;
    if (fd >= 0) close(fd);
    return stream.End(
        error == ENOENT
            ? RpcError(Reason::kLogNotFound,
                       absl::StrCat("no step of job ", job_id, " was recorded"), {{"job", job_id}})
            : RpcError(
                  Reason::kLogUnreadable,
                  absl::StrCat("cannot read the steps of job ", job_id, ": ", std::strerror(error)),
                  {{"job", job_id}}));
  }
  int64_t at = offset < 0 ? std::max<int64_t>(0, info.st_size + offset) : offset;
  v1::LogChunk chunk;
  bool wanted = true;
  while (wanted && at < info.st_size) {
    std::string& data = *chunk.mutable_data();
    data.resize(static_cast<size_t>(std::min<int64_t>(kChunkBytes, info.st_size - at)));
    const ssize_t got = pread(fd, data.data(), data.size(), at);
    if (got <= 0) break;  // cut meanwhile: what is there was sent
    data.resize(static_cast<size_t>(got));
    chunk.set_offset(at);
    wanted = writer.Write(chunk);
    at += got;
  }
  close(fd);
  if (wanted) stream.End(absl::OkStatus());
}

}  // namespace upipe::coordinator
