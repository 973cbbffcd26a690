#include "coordinator/rpc/log_stream.h"

#include <utility>

#include "common/errors/rpc_error.h"
#include "coordinator/rpc/grpc_status.h"

namespace upipe::coordinator {

bool LogStream::Attach(std::function<void()> broken) {
  std::lock_guard lock(mutex_);
  if (finished_ || end_ || broken_) return false;
  broken_ = std::move(broken);
  return true;
}

bool LogStream::attached() const {
  std::lock_guard lock(mutex_);
  return broken_ != nullptr || finished_ || end_.has_value();
}

bool LogStream::Write(const v1::LogChunk& chunk, std::function<void()> written) {
  std::lock_guard lock(mutex_);
  if (finished_ || end_ || writing_) return false;
  outgoing_.set_data(chunk.data());
  outgoing_.set_offset(chunk.offset());
  outgoing_.set_gap(chunk.gap());
  written_ = std::move(written);
  writing_ = true;
  StartWrite(&outgoing_);
  return true;
}

void LogStream::OnWriteDone(bool ok) {
  std::function<void()> written;
  {
    std::lock_guard lock(mutex_);
    writing_ = false;
    written.swap(written_);
    if (!ok && !end_) end_ = RpcError(Reason::kCallerLeft, "the reader left");
    if (end_ && !finished_) {
      finished_ = true;
      Finish(ToGrpc(*end_));
      written = nullptr;
    }
  }
  if (written) written();
}

void LogStream::End(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (finished_ || end_) return;
  end_ = status;
  if (writing_) return;
  finished_ = true;
  Finish(ToGrpc(status));
}

void LogStream::OnCancel() { End(RpcError(Reason::kCallerLeft, "the reader left")); }

void LogStream::OnDone() {
  std::function<void()> broken;
  {
    std::lock_guard lock(mutex_);
    broken.swap(broken_);
  }
  if (broken) broken();
  on_done_();
  self.reset();
}

}  // namespace upipe::coordinator
