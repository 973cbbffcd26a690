#include "coordinator/rpc/log_relay.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/ids.h"
#include "common/units.h"
#include "coordinator/rpc/grpc_status.h"
#include "coordinator/rpc/request_checks.h"

namespace upipe::coordinator {

namespace {

// The worker's end: reads a chunk, passes it on, reads the next when it was written.
class Upload : public grpc::ServerReadReactor<v1::LogChunk> {
 public:
  explicit Upload(LogRelay& relay) : relay_(relay) {}

  void Begin(std::shared_ptr<Upload> self) {
    self_ = std::move(self);
    Read();
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      if (stream_) {  // ended already when the log was complete
        stream_->End(
            RpcError(Reason::kLogBrokenOff, "the worker's log stream broke off; try again"));
      }
      return Leave(grpc::Status::OK);
    }
    if (!stream_ && !Join())
      return Leave(ToGrpc(RpcError(Reason::kLogUnwanted, "nobody reads this log")));
    if (!chunk_.error().empty()) {
      stream_->End(RpcError(chunk_.not_found() ? Reason::kLogNotFound : Reason::kLogUnreadable,
                            chunk_.error()));
      return Leave(grpc::Status::OK);
    }
    if (chunk_.complete()) {
      stream_->End(absl::OkStatus());
      return Leave(grpc::Status::OK);
    }
    if (!stream_->Write(chunk_, [self = self_] { self->Read(); })) {
      Leave(ToGrpc(RpcError(Reason::kLogUnwanted, "the reader left")));
    }
  }
  void OnDone() override { self_.reset(); }

 private:
  bool Join() {
    stream_ = relay_.Find(chunk_.request_id());
    return stream_ != nullptr && stream_->Attach([self = self_] {
      self->Leave(ToGrpc(RpcError(Reason::kLogUnwanted, "the reader left")));
    });
  }
  void Read() {
    std::lock_guard lock(mutex_);
    if (!finished_) StartRead(&chunk_);
  }
  void Leave(const grpc::Status& status) {
    std::lock_guard lock(mutex_);
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }

  LogRelay& relay_;
  v1::LogChunk chunk_;
  std::shared_ptr<LogStream> stream_;
  std::shared_ptr<Upload> self_;
  std::mutex mutex_;
  bool finished_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::LogsResponse>* LogRelay::Open(const v1::LogsRequest& request,
                                                           Loop& loop) {
  const std::string id = RandomNonce();
  auto stream = std::make_shared<LogStream>([this, id] {
    std::lock_guard lock(mutex_);
    streams_.erase(id);
  });
  stream->self = stream;
  {
    std::lock_guard lock(mutex_);
    streams_[id] = {stream, SystemClock().Now()};
  }
  if (const absl::Status wrong = CheckRequest(request); !wrong.ok()) {
    stream->End(wrong);
    return stream.get();
  }
  if (request.file() == v1::RANK_FILE_JOB_STEPS) {
    OpenStepFile(request, stream, loop);
    return stream.get();
  }
  const bool posted = loop.Post(LogCall{request, id, [stream](absl::StatusOr<std::string> worker) {
                                          if (!worker.ok()) stream->End(worker.status());
                                        }});
  if (!posted) stream->End(Busy());
  return stream.get();
}

// The loop says whether there is such a job.
void LogRelay::OpenStepFile(const v1::LogsRequest& request,
                            const std::shared_ptr<LogStream>& stream, Loop& loop) {
  v1::GetJobRequest job;
  job.set_id(request.id());
  const auto send = [this, stream, request](const absl::StatusOr<v1::Job>& found) {
    if (!found.ok()) return stream->End(found.status());
    step_files_.Send(stream, request.id(), request.offset());
  };
  if (!loop.Post(GetJobCall{job, send})) stream->End(Busy());
}

grpc::ServerReadReactor<v1::LogChunk>* LogRelay::Accept() {
  auto upload = std::make_shared<Upload>(*this);
  upload->Begin(upload);
  return upload.get();
}

std::shared_ptr<LogStream> LogRelay::Find(const std::string& upload_id) {
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(upload_id);
  return found == streams_.end() ? nullptr : found->second.stream;
}

void LogRelay::End(const absl::Status& status) {
  std::vector<std::shared_ptr<LogStream>> open;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, waiting] : streams_) open.push_back(waiting.stream);
  }
  for (const auto& stream : open) stream->End(status);
}

void LogRelay::Expire(BootTime now, absl::Duration patience) {
  std::vector<std::shared_ptr<LogStream>> late;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [id, waiting] : streams_) {
      if (now - waiting.since > patience) late.push_back(waiting.stream);
    }
  }
  for (const auto& stream : late) {
    if (stream->attached()) continue;
    stream->End(
        RpcError(Reason::kLogLate,
                 absl::StrCat("the worker did not send its log within ", FormatTimeSpan(patience)),
                 {{"patience_seconds", absl::ToDoubleSeconds(patience)}}));
  }
}

}  // namespace upipe::coordinator
