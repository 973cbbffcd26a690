#include "worker/rpc/trainer_server.h"

#include <unistd.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/rpc/send_queue.h"

namespace upipe::worker {
namespace {

constexpr size_t kWaitingMax = 64;
constexpr int kMessageBytesMax = 256 << 20;

}  // namespace

class TrainerServer::Stream
    : public grpc::ServerBidiReactor<v1::TrainerMessage, v1::WorkerCommand> {
 public:
  Stream(TrainerServer& owner, uint64_t connection) : owner_(owner), connection_(connection) {
    StartRead(&incoming_);
  }

  void Send(v1::WorkerCommand command) {
    std::lock_guard lock(mutex_);
    if (over_) return;
    if (!queue_.Push(std::move(command))) return End();
    Pump();
  }

  void ReadNext() {
    std::lock_guard lock(mutex_);
    if (over_ || reading_) return;
    reading_ = true;
    StartRead(&incoming_);
  }

  void Close() {
    std::lock_guard lock(mutex_);
    End();
  }

 private:
  void Pump() {
    if (const v1::WorkerCommand* next = queue_.Next(); next != nullptr) StartWrite(next);
  }

  void End() {
    if (over_) return;
    over_ = true;
    Finish(grpc::Status::OK);
  }

  void OnReadDone(bool ok) override {
    if (!ok) return Close();
    {
      std::lock_guard lock(mutex_);
      reading_ = false;
    }
    owner_.callbacks_.received(connection_, std::move(incoming_));
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    queue_.WriteDone();
    if (ok && !over_) Pump();
  }

  void OnCancel() override { Close(); }

  void OnDone() override {
    {
      std::lock_guard lock(owner_.mutex_);
      owner_.streams_.erase(connection_);  // from here on nobody else reaches this object
    }
    TrainerServer& owner = owner_;
    owner.callbacks_.closed(connection_);
    delete this;
    std::lock_guard lock(owner.mutex_);
    --owner.num_streams_;
    owner.stream_ended_.notify_all();
  }

  TrainerServer& owner_;
  const uint64_t connection_;
  v1::TrainerMessage incoming_;
  std::mutex mutex_;
  SendQueue<v1::WorkerCommand> queue_{kWaitingMax};
  bool reading_ = true;
  bool over_ = false;
};

absl::StatusOr<std::unique_ptr<TrainerServer>> TrainerServer::Start(const std::string& socket_path,
                                                                    Callbacks callbacks) {
  unlink(socket_path.c_str());
  auto server =
      std::unique_ptr<TrainerServer>(new TrainerServer(socket_path, std::move(callbacks)));
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.SetMaxSendMessageSize(kMessageBytesMax);
  builder.AddListeningPort(absl::StrCat("unix:", socket_path), grpc::InsecureServerCredentials());
  builder.RegisterService(server.get());
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot listen on the unix socket ", socket_path));
  }
  return server;
}

TrainerServer::~TrainerServer() {
  if (server_ == nullptr) return;
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  {
    std::unique_lock lock(mutex_);
    stream_ended_.wait(lock, [this] { return num_streams_ == 0; });
  }
  unlink(socket_path_.c_str());
}

grpc::ServerBidiReactor<v1::TrainerMessage, v1::WorkerCommand>* TrainerServer::Attach(
    grpc::CallbackServerContext*) {
  std::lock_guard lock(mutex_);
  const uint64_t connection = next_connection_++;
  ++num_streams_;
  return streams_[connection] = new Stream(*this, connection);
}

void TrainerServer::Send(uint64_t connection, v1::WorkerCommand command) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(connection); found != streams_.end())
    found->second->Send(std::move(command));
}

void TrainerServer::Read(uint64_t connection) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(connection); found != streams_.end())
    found->second->ReadNext();
}

void TrainerServer::Close(uint64_t connection) {
  std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(connection); found != streams_.end()) found->second->Close();
}

}  // namespace upipe::worker
