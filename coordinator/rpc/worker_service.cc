// Worker calls: one Session stream per worker, one UploadLog stream per log somebody reads.
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "coordinator/rpc/grpc_status.h"
#include "coordinator/rpc/services.h"

namespace upipe::coordinator {
namespace {

constexpr size_t kMaxQueuedMessages = 8192;

class SessionStream : public grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>,
                      public WorkerLink {
 public:
  SessionStream(Loop& loop, SessionId id) : loop_(loop), id_(id) {}
  void Begin(const std::shared_ptr<SessionStream>& self) {
    self_ = self;
    std::lock_guard lock(mutex_);
    StartRead(&incoming_);
  }

  void Send(v1::CoordinatorMessage message) override {
    std::lock_guard lock(mutex_);
    if (end_) return;
    if (outgoing_.size() >= kMaxQueuedMessages) {
      return EndLocked(
          RpcError(Reason::kWorkerTooSlow,
                   absl::StrCat("the worker left ", outgoing_.size(), " messages unread"),
                   {{"messages", outgoing_.size()}}));
    }
    outgoing_.push_back(std::move(message));
    Pump();
  }
  void Close(const absl::Status& why) override {
    std::lock_guard lock(mutex_);
    EndLocked(why);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      std::lock_guard lock(mutex_);
      return EndLocked(absl::OkStatus());
    }
    const bool posted = loop_.Post(SessionMessage{id_, self_, std::move(incoming_)});
    std::lock_guard lock(mutex_);
    if (!posted) return EndLocked(Busy());
    if (end_) return;
    incoming_.Clear();
    StartRead(&incoming_);
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (!ok) EndLocked(RpcError(Reason::kCallerLeft, "the worker left"));
    Pump();
  }
  void OnCancel() override {
    std::lock_guard lock(mutex_);
    EndLocked(RpcError(Reason::kCallerLeft, "the worker left"));
  }
  void OnDone() override {
    loop_.PostEnd(SessionEnded{id_});
    self_.reset();
  }

 private:
  // Nothing queued behind an end is sent; the write in flight is waited for.
  void EndLocked(const absl::Status& why) {
    if (end_) return;
    end_ = why;
    Pump();
  }
  void Pump() {
    if (writing_ || finished_) return;
    if (end_) {
      finished_ = true;
      return Finish(ToGrpc(*end_));
    }
    if (outgoing_.empty()) return;
    writing_ = true;
    StartWrite(&outgoing_.front());
  }

  Loop& loop_;
  const SessionId id_;
  std::shared_ptr<SessionStream> self_;
  v1::WorkerMessage incoming_;
  std::mutex mutex_;
  std::deque<v1::CoordinatorMessage> outgoing_;  // front is being written when writing_
  std::optional<absl::Status> end_;
  bool writing_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>* WorkerServiceReactors::Session(
    grpc::CallbackServerContext*) {
  const auto stream = std::make_shared<SessionStream>(loop_, next_session_++);
  stream->Begin(stream);
  return stream.get();
}

grpc::ServerReadReactor<v1::LogChunk>* WorkerServiceReactors::UploadLog(
    grpc::CallbackServerContext*, v1::UploadLogResponse*) {
  return logs_.Accept();
}

}  // namespace upipe::coordinator
