// The gRPC services. Reactors move bytes between sockets and the loop's bounded queue, nothing
// else: no lock is held across I/O, no decision is taken here.
#pragma once

#include <atomic>

#include "coordinator/rpc/log_relay.h"
#include "coordinator/runtime/loop.h"
#include "upipe/v1/job_service.grpc.pb.h"
#include "upipe/v1/node_service.grpc.pb.h"
#include "upipe/v1/worker_service.grpc.pb.h"

namespace upipe::coordinator {

class JobServiceReactors : public v1::JobService::CallbackService {
 public:
  JobServiceReactors(Loop& loop, LogRelay& logs) : loop_(loop), logs_(logs) {}
  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitResponse* response) override;
  grpc::ServerUnaryReactor* GetJob(grpc::CallbackServerContext* context,
                                   const v1::GetJobRequest* request, v1::Job* response) override;
  grpc::ServerUnaryReactor* ListJobs(grpc::CallbackServerContext* context,
                                     const v1::ListJobsRequest* request,
                                     v1::ListJobsResponse* response) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const v1::CancelRequest* request,
                                   v1::CancelResponse* response) override;
  grpc::ServerUnaryReactor* Hold(grpc::CallbackServerContext* context,
                                 const v1::HoldRequest* request,
                                 v1::HoldResponse* response) override;
  grpc::ServerUnaryReactor* Release(grpc::CallbackServerContext* context,
                                    const v1::ReleaseRequest* request,
                                    v1::ReleaseResponse* response) override;
  grpc::ServerUnaryReactor* Why(grpc::CallbackServerContext* context, const v1::WhyRequest* request,
                                v1::WhyResponse* response) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext* context,
                                                     const v1::WatchRequest* request) override;
  grpc::ServerWriteReactor<v1::LogsResponse>* Logs(grpc::CallbackServerContext* context,
                                                   const v1::LogsRequest* request) override;

 private:
  Loop& loop_;
  LogRelay& logs_;
};

class NodeServiceReactors : public v1::NodeService::CallbackService {
 public:
  explicit NodeServiceReactors(Loop& loop) : loop_(loop) {}
  grpc::ServerUnaryReactor* ListNodes(grpc::CallbackServerContext* context,
                                      const v1::ListNodesRequest* request,
                                      v1::ListNodesResponse* response) override;
  grpc::ServerUnaryReactor* Cordon(grpc::CallbackServerContext* context,
                                   const v1::CordonRequest* request,
                                   v1::CordonResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* Uncordon(grpc::CallbackServerContext* context,
                                     const v1::UncordonRequest* request,
                                     v1::UncordonResponse* response) override;
  grpc::ServerUnaryReactor* FenceNode(grpc::CallbackServerContext* context,
                                      const v1::FenceNodeRequest* request,
                                      v1::FenceNodeResponse* response) override;
  grpc::ServerUnaryReactor* ForgetNode(grpc::CallbackServerContext* context,
                                       const v1::ForgetNodeRequest* request,
                                       v1::ForgetNodeResponse* response) override;

 private:
  Loop& loop_;
};

class WorkerServiceReactors : public v1::WorkerService::CallbackService {
 public:
  WorkerServiceReactors(Loop& loop, LogRelay& logs) : loop_(loop), logs_(logs) {}
  grpc::ServerBidiReactor<v1::WorkerMessage, v1::CoordinatorMessage>* Session(
      grpc::CallbackServerContext* context) override;
  grpc::ServerReadReactor<v1::LogChunk>* UploadLog(grpc::CallbackServerContext* context,
                                                   v1::UploadLogResponse* response) override;

 private:
  Loop& loop_;
  LogRelay& logs_;
  std::atomic<SessionId> next_session_{1};
};

}  // namespace upipe::coordinator
