#include "coordinator/rpc/admin_service.h"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/errors/rpc_error.h"
#include "coordinator/rpc/grpc_status.h"

namespace upipe::coordinator {
namespace {

// One piece on its way at a time: a slow reader slows the thread that reads the copy.
class BackupStream : public grpc::ServerWriteReactor<v1::BackupResponse>, public BackupReader {
 public:
  void Begin(BackupThread& backups, const std::shared_ptr<BackupStream>& self) {
    self_ = self;
    backups.Start(self);
  }

  bool Write(v1::BackupResponse piece) override {
    std::unique_lock lock(mutex_);
    written_.wait(lock, [this] { return !writing_; });
    if (end_) return false;
    outgoing_ = std::move(piece);
    writing_ = true;
    StartWrite(&outgoing_);
    return true;
  }
  void End(const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    EndLocked(status);
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    written_.notify_one();
    if (!ok && !end_) end_ = RpcError(Reason::kCallerLeft, "the reader left");
    FinishIfEnded();
  }
  void OnCancel() override {
    std::lock_guard lock(mutex_);
    EndLocked(RpcError(Reason::kCallerLeft, "the reader left"));
  }
  void OnDone() override { self_.reset(); }

 private:
  void EndLocked(const absl::Status& status) {
    if (!end_) end_ = status;
    FinishIfEnded();
  }
  // What was handed over before the end is sent first.
  void FinishIfEnded() {
    if (!end_ || writing_ || finished_) return;
    finished_ = true;
    Finish(ToGrpc(*end_));
  }

  std::shared_ptr<BackupStream> self_;
  std::mutex mutex_;
  std::condition_variable written_;
  v1::BackupResponse outgoing_;
  std::optional<absl::Status> end_;
  bool writing_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::BackupResponse>* AdminServiceReactors::Backup(
    grpc::CallbackServerContext*, const v1::BackupRequest*) {
  const auto stream = std::make_shared<BackupStream>();
  stream->Begin(backups_, stream);
  return stream.get();
}

}  // namespace upipe::coordinator
