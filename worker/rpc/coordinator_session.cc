#include "worker/rpc/coordinator_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/rpc/send_queue.h"

namespace upipe::worker {
namespace {

constexpr size_t kWaitingMax = 4096;
constexpr int kMessageBytesMax = 256 << 20;  // a plan of a thousand ranks

}  // namespace

std::shared_ptr<grpc::Channel> CoordinatorChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Also the time one attempt to connect may take, which a busy machine needs.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// Holds itself until gRPC is done with it.
class CoordinatorSession::Stream
    : public grpc::ClientBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>,
      public std::enable_shared_from_this<Stream> {
 public:
  Stream(CoordinatorSession& owner, uint64_t session) : owner_(owner), session_(session) {}

  void Begin() {
    self_ = shared_from_this();
    owner_.stub_->async()->Session(&context_, this);
    AddHold();  // Send may start a write until the read side ends
    StartRead(&incoming_);
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  void Send(v1::WorkerMessage message) {
    const std::string conflate = message.has_progress()
                                     ? absl::StrCat(message.progress().ref().fence().nonce(), "/",
                                                    message.progress().ref().rank())
                                     : "";
    std::lock_guard lock(mutex_);
    if (over_) return;
    if (!queue_.Push(std::move(message), conflate)) {
      why_ = absl::StrCat("the coordinator took none of ", kWaitingMax, " waiting messages");
      context_.TryCancel();
      return;
    }
    Pump();
  }

 private:
  void Pump() {
    if (const v1::WorkerMessage* next = queue_.Next(); next != nullptr) StartWrite(next);
  }

  void OnReadDone(bool ok) override {
    if (ok && owner_.callbacks_.received(session_, std::move(incoming_))) {
      incoming_.Clear();
      StartRead(&incoming_);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      over_ = true;
      if (ok) why_ = "the worker is too busy to take more messages";
    }
    context_.TryCancel();
    RemoveHold();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    queue_.WriteDone();
    if (ok && !over_) Pump();
  }

  void OnDone(const grpc::Status& status) override {
    std::string why;
    {
      std::lock_guard lock(mutex_);
      why = why_.empty() ? status.error_message() : why_;
    }
    owner_.callbacks_.closed(session_, why.empty() ? "closed by the coordinator" : why);
    std::shared_ptr<Stream> self = std::move(self_);
    // Notified under the lock: the owner may be destroyed as soon as the count is zero and the lock
    // free.
    std::lock_guard lock(owner_.mutex_);
    if (owner_.stream_ == self) owner_.stream_.reset();
    --owner_.num_streams_;
    owner_.stream_ended_.notify_all();
  }

  CoordinatorSession& owner_;
  const uint64_t session_;
  grpc::ClientContext context_;
  v1::CoordinatorMessage incoming_;
  std::shared_ptr<Stream> self_;
  std::mutex mutex_;
  SendQueue<v1::WorkerMessage> queue_{kWaitingMax};
  bool over_ = false;
  std::string why_;
};

CoordinatorSession::CoordinatorSession(std::shared_ptr<grpc::Channel> channel, Callbacks callbacks)
    : stub_(v1::WorkerService::NewStub(std::move(channel))), callbacks_(std::move(callbacks)) {}

CoordinatorSession::~CoordinatorSession() {
  Close();
  std::unique_lock lock(mutex_);
  stream_ended_.wait(lock, [this] { return num_streams_ == 0; });
}

void CoordinatorSession::Open(uint64_t session) {
  Close();
  auto stream = std::make_shared<Stream>(*this, session);
  {
    std::lock_guard lock(mutex_);
    stream_ = stream;
    ++num_streams_;
  }
  stream->Begin();
}

void CoordinatorSession::Close() {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(mutex_);
    stream = std::move(stream_);
  }
  if (stream != nullptr) stream->Cancel();
}

void CoordinatorSession::Send(v1::WorkerMessage message) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard lock(mutex_);
    stream = stream_;
  }
  if (stream != nullptr) stream->Send(std::move(message));
}

}  // namespace upipe::worker
