// JobService: unary calls wait in the loop for their answer; Watch sends the latest job and the
// latest report.
#include <memory>
#include <mutex>
#include <optional>

#include "common/errors/rpc_error.h"
#include "coordinator/rpc/grpc_status.h"
#include "coordinator/rpc/request_checks.h"
#include "coordinator/rpc/services.h"
#include "coordinator/rpc/unary_calls.h"

namespace upipe::coordinator {
namespace {

class WatchStream : public grpc::ServerWriteReactor<v1::WatchResponse>, public Watcher {
 public:
  explicit WatchStream(Loop& loop) : loop_(loop) {}
  void Begin(const v1::WatchRequest& request, const std::shared_ptr<WatchStream>& self) {
    self_ = self;
    if (const absl::Status wrong = CheckRequest(request); !wrong.ok()) return End(wrong);
    if (!loop_.Post(WatchCall{request.id(), self})) End(Busy());
  }

  void OfferJob(std::shared_ptr<const v1::Job> job) override {
    std::lock_guard lock(mutex_);
    job_ = std::move(job);
    Pump();
  }
  void OfferReport(const v1::StepReport& report) override {
    std::lock_guard lock(mutex_);
    report_ = report;
    Pump();
  }
  void End(const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    if (!end_) end_ = status;
    Pump();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    if (!ok) {
      job_.reset();
      report_.reset();
      if (!end_) end_ = RpcError(Reason::kCallerLeft, "the watcher left");
    }
    Pump();
  }
  void OnCancel() override {
    std::lock_guard lock(mutex_);
    job_.reset();
    report_.reset();
    end_ = RpcError(Reason::kCallerLeft, "the watcher left");
    Pump();
  }
  void OnDone() override {
    loop_.PostEnd(WatchEnded{self_});
    self_.reset();
  }

 private:
  // One write at a time; the end comes after what was offered.
  void Pump() {
    if (writing_ || finished_) return;
    if (job_ || report_) {
      outgoing_.Clear();
      if (job_) *outgoing_.mutable_job() = *job_;
      if (report_) *outgoing_.mutable_report() = *report_;
      job_.reset();
      report_.reset();
      writing_ = true;
      return StartWrite(&outgoing_);
    }
    if (!end_) return;
    finished_ = true;
    Finish(ToGrpc(*end_));
  }

  Loop& loop_;
  std::shared_ptr<WatchStream> self_;
  std::mutex mutex_;
  v1::WatchResponse outgoing_;
  std::shared_ptr<const v1::Job> job_;
  std::optional<v1::StepReport> report_;
  std::optional<absl::Status> end_;
  bool writing_ = false;
  bool finished_ = false;
};

}  // namespace

grpc::ServerUnaryReactor* JobServiceReactors::Submit(grpc::CallbackServerContext* context,
                                                     const v1::SubmitRequest* request,
                                                     v1::SubmitResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, SubmitCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::GetJob(grpc::CallbackServerContext* context,
                                                     const v1::GetJobRequest* request,
                                                     v1::Job* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, GetJobCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::ListJobs(grpc::CallbackServerContext* context,
                                                       const v1::ListJobsRequest* request,
                                                       v1::ListJobsResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  PostOrRefuse(loop_, reactor, ListJobsCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::Cancel(grpc::CallbackServerContext* context,
                                                     const v1::CancelRequest* request,
                                                     v1::CancelResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, CancelCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::Hold(grpc::CallbackServerContext* context,
                                                   const v1::HoldRequest* request,
                                                   v1::HoldResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, HoldCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::Release(grpc::CallbackServerContext* context,
                                                      const v1::ReleaseRequest* request,
                                                      v1::ReleaseResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, ReleaseCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* JobServiceReactors::Why(grpc::CallbackServerContext* context,
                                                  const v1::WhyRequest* request,
                                                  v1::WhyResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, WhyCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerWriteReactor<v1::WatchResponse>* JobServiceReactors::Watch(
    grpc::CallbackServerContext*, const v1::WatchRequest* request) {
  const auto stream = std::make_shared<WatchStream>(loop_);
  stream->Begin(*request, stream);
  return stream.get();
}

grpc::ServerWriteReactor<v1::LogsResponse>* JobServiceReactors::Logs(
    grpc::CallbackServerContext*, const v1::LogsRequest* request) {
  return logs_.Open(*request, loop_);
}

}  // namespace upipe::coordinator
