#include "worker/rpc/trainer_link.h"

#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "upipe/v1/trainer_service.grpc.pb.h"
#include "worker/rpc/send_queue.h"

namespace upipe::worker {
namespace {

constexpr size_t kWaitingMax = 1024;
constexpr int kMessageBytesMax = 256 << 20;

class UnixSocketLink : public TrainerLink,
                       public grpc::ClientBidiReactor<v1::TrainerMessage, v1::WorkerCommand> {
 public:
  UnixSocketLink(const std::string& socket_path, Handlers handlers)
      : handlers_(std::move(handlers)) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
    arguments.SetMaxSendMessageSize(kMessageBytesMax);
    stub_ = v1::TrainerService::NewStub(grpc::CreateCustomChannel(
        absl::StrCat("unix:", socket_path), grpc::InsecureChannelCredentials(), arguments));
    stub_->async()->Attach(&context_, this);
    AddHold();
    StartRead(&incoming_);
    StartCall();
  }

  ~UnixSocketLink() override {
    context_.TryCancel();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  void Send(v1::TrainerMessage message) override {
    std::lock_guard lock(mutex_);
    if (over_) return;
    if (!queue_.Push(message)) {
      if (!message.has_report()) {
        context_.TryCancel();
        return;
      }
      queue_.ReplaceNewest(std::move(message));
    }
    Pump();
  }

  void Finish(const v1::TrainerFinished& finished, absl::Duration patience) override {
    v1::TrainerMessage message;
    *message.mutable_finished() = finished;
    {
      std::lock_guard lock(mutex_);
      finishing_ = true;
    }
    Send(std::move(message));
    std::unique_lock lock(mutex_);
    // The worker ends the stream when it has read the half-close, which is behind every message.
    changed_.wait_for(lock, absl::ToChronoNanoseconds(patience), [this] { return over_; });
  }

 private:
  void Pump() {
    if (const v1::TrainerMessage* next = queue_.Next(); next != nullptr) {
      StartWrite(next);
    } else if (finishing_ && queue_.idle() && !half_closed_) {
      half_closed_ = true;
      StartWritesDone();
    }
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      handlers_.command(incoming_);
      StartRead(&incoming_);
      return;
    }
    bool lost = false;
    {
      std::lock_guard lock(mutex_);
      over_ = true;
      lost = !finishing_;
      changed_.notify_all();
    }
    if (lost) handlers_.lost();
    RemoveHold();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    queue_.WriteDone();
    if (ok && !over_) Pump();
  }

  void OnDone(const grpc::Status&) override {
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  const Handlers handlers_;
  std::unique_ptr<v1::TrainerService::Stub> stub_;
  grpc::ClientContext context_;
  v1::WorkerCommand incoming_;
  std::mutex mutex_;
  std::condition_variable changed_;
  SendQueue<v1::TrainerMessage> queue_{kWaitingMax};
  bool finishing_ = false;
  bool half_closed_ = false;
  bool over_ = false;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<TrainerLink> TrainerLink::Dial(const std::string& socket_path,
                                               const v1::TrainerHello& hello, Handlers handlers) {
  auto link = std::make_unique<UnixSocketLink>(socket_path, std::move(handlers));
  v1::TrainerMessage message;
  *message.mutable_hello() = hello;
  link->Send(std::move(message));
  return link;
}

}  // namespace upipe::worker
