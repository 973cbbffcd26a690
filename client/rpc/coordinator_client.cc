#include "client/rpc/coordinator_client.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "upipe/v1/job_service.grpc.pb.h"
#include "upipe/v1/node_service.grpc.pb.h"

namespace upipe::client {
namespace {

class GrpcCoordinatorClient : public CoordinatorClient {
 public:
  GrpcCoordinatorClient(std::string address, absl::Duration deadline)
      : address_(std::move(address)),
        deadline_(deadline),
        channel_(grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(),
                                           ChannelArguments())),
        jobs_(v1::JobService::NewStub(channel_)),
        nodes_(v1::NodeService::NewStub(channel_)),
        admin_(v1::AdminService::NewStub(channel_)) {}

  absl::StatusOr<v1::Job> Submit(const v1::SubmitRequest& request) override {
    return Unary<v1::SubmitResponse>(
        [&](auto* context, auto* response) { return jobs_->Submit(context, request, response); },
        [](v1::SubmitResponse& response) { return std::move(*response.mutable_job()); });
  }

  absl::StatusOr<v1::Job> GetJob(const std::string& id) override {
    v1::GetJobRequest request;
    request.set_id(id);
    return Unary<v1::Job>(
        [&](auto* context, auto* response) { return jobs_->GetJob(context, request, response); },
        [](v1::Job& response) { return std::move(response); });
  }

  absl::StatusOr<v1::ListJobsResponse> ListJobs(const v1::ListJobsRequest& request) override {
    return Unary<v1::ListJobsResponse>(
        [&](auto* context, auto* response) { return jobs_->ListJobs(context, request, response); },
        [](v1::ListJobsResponse& response) { return std::move(response); });
  }

  absl::StatusOr<v1::Job> Cancel(const v1::CancelRequest& request) override {
    return Unary<v1::CancelResponse>(
        [&](auto* context, auto* response) { return jobs_->Cancel(context, request, response); },
        [](v1::CancelResponse& response) { return std::move(*response.mutable_job()); });
  }

  absl::StatusOr<v1::Job> Hold(const std::string& id) override {
    v1::HoldRequest request;
    request.set_id(id);
    return Unary<v1::HoldResponse>(
        [&](auto* context, auto* response) { return jobs_->Hold(context, request, response); },
        [](v1::HoldResponse& response) { return std::move(*response.mutable_job()); });
  }

  absl::StatusOr<v1::Job> Release(const std::string& id) override {
    v1::ReleaseRequest request;
    request.set_id(id);
    return Unary<v1::ReleaseResponse>(
        [&](auto* context, auto* response) { return jobs_->Release(context, request, response); },
        [](v1::ReleaseResponse& response) { return std::move(*response.mutable_job()); });
  }

  absl::StatusOr<v1::WhyResponse> Why(const std::string& id) override {
    v1::WhyRequest request;
    request.set_id(id);
    return Unary<v1::WhyResponse>(
        [&](auto* context, auto* response) { return jobs_->Why(context, request, response); },
        [](v1::WhyResponse& response) { return std::move(response); });
  }

  absl::StatusOr<v1::ListNodesResponse> ListNodes() override {
    return Unary<v1::ListNodesResponse>(
        [&](auto* context, auto* response) {
          return nodes_->ListNodes(context, v1::ListNodesRequest(), response);
        },
        [](v1::ListNodesResponse& response) { return std::move(response); });
  }

  absl::StatusOr<v1::Node> Cordon(const v1::CordonRequest& request) override {
    return Unary<v1::CordonResponse>(
        [&](auto* context, auto* response) { return nodes_->Cordon(context, request, response); },
        [](v1::CordonResponse& response) { return std::move(*response.mutable_node()); });
  }

  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request) override {
    return Unary<v1::DrainResponse>(
        [&](auto* context, auto* response) { return nodes_->Drain(context, request, response); },
        [](v1::DrainResponse& response) { return std::move(response); });
  }

  absl::StatusOr<v1::Node> Uncordon(const std::string& worker) override {
    v1::UncordonRequest request;
    request.set_worker(worker);
    return Unary<v1::UncordonResponse>(
        [&](auto* context, auto* response) { return nodes_->Uncordon(context, request, response); },
        [](v1::UncordonResponse& response) { return std::move(*response.mutable_node()); });
  }

  absl::StatusOr<v1::Node> FenceNode(const std::string& worker) override {
    v1::FenceNodeRequest request;
    request.set_worker(worker);
    return Unary<v1::FenceNodeResponse>(
        [&](auto* context, auto* response) {
          return nodes_->FenceNode(context, request, response);
        },
        [](v1::FenceNodeResponse& response) { return std::move(*response.mutable_node()); });
  }

  absl::Status ForgetNode(const std::string& worker) override {
    v1::ForgetNodeRequest request;
    request.set_worker(worker);
    return Unary<v1::ForgetNodeResponse>(
               [&](auto* context, auto* response) {
                 return nodes_->ForgetNode(context, request, response);
               },
               [](v1::ForgetNodeResponse& response) { return std::move(response); })
        .status();
  }

  absl::Status Watch(const std::string& id, absl::Duration limit,
                     const OnWatch& on_message) override {
    v1::WatchRequest request;
    request.set_id(id);
    grpc::ClientContext context;
    if (limit < absl::InfiniteDuration()) {
      context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(limit));
    }
    return ReadAll<v1::WatchResponse>(context, jobs_->Watch(&context, request), on_message);
  }

  absl::Status Logs(const v1::LogsRequest& request, const OnLogs& on_message) override {
    grpc::ClientContext context;
    return ReadAll<v1::LogsResponse>(context, jobs_->Logs(&context, request), on_message);
  }

  absl::Status Backup(const OnBackup& on_message) override {
    grpc::ClientContext context;
    return ReadAll<v1::BackupResponse>(context, admin_->Backup(&context, v1::BackupRequest()),
                                       on_message);
  }

 private:
  // A dead connection is noticed within 40 s; a coordinator that comes back is reached within 2 s.
  static grpc::ChannelArguments ChannelArguments() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
    // Also the time one attempt to connect may take, which a busy machine needs.
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5'000);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2'000);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    arguments.SetMaxReceiveMessageSize(64 << 20);
    return arguments;
  }

  template <typename Response, typename Call, typename Take>
  auto Unary(Call call, Take take) -> absl::StatusOr<decltype(take(std::declval<Response&>()))> {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(deadline_));
    Response response;
    const grpc::Status status = call(&context, &response);
    if (!status.ok()) return ToAbsl(status);
    return take(response);
  }

  template <typename Response, typename Reader, typename OnMessage>
  absl::Status ReadAll(grpc::ClientContext& context, Reader reader, const OnMessage& on_message) {
    Response response;
    while (reader->Read(&response)) {
      if (on_message(response)) continue;
      context.TryCancel();
      reader->Finish();
      return absl::OkStatus();
    }
    return ToAbsl(reader->Finish());
  }

  absl::Status ToAbsl(const grpc::Status& status) const {
    const auto code =
        static_cast<absl::StatusCode>(status.error_code());  // the numbers are the same
    if (status.ok()) return absl::OkStatus();
    absl::Status error = DecodeError(code, status.error_message(), status.error_details());
    if (!ErrorInfoOf(error).reason().empty() && code != absl::StatusCode::kCancelled) return error;
    if (code == absl::StatusCode::kUnavailable && status.error_details().empty()) {
      return Failure(
          Reason::kCoordinatorUnreachable,
          absl::StrCat("cannot reach the coordinator at ", address_, ": ", status.error_message()));
    }
    if (code == absl::StatusCode::kCancelled) {  // never by us: those calls have returned already
      return Failure(Reason::kCallDropped, absl::StrCat("the coordinator at ", address_,
                                                        " shut down or dropped the call"));
    }
    if (code == absl::StatusCode::kDeadlineExceeded) {
      return Failure(Reason::kCallLate,
                     absl::StrCat("the coordinator at ", address_, " did not answer in time"));
    }
    if (status.error_message().empty()) {  // gRPC itself refused the message
      return absl::Status(code, absl::StrCat("the coordinator at ", address_, " answered ",
                                             absl::StatusCodeToString(code), " and no reason"));
    }
    return error;
  }

  absl::Status Failure(Reason reason, const std::string& message) const {
    return RpcError(reason, message, {{"address", address_}});
  }

  const std::string address_;
  const absl::Duration deadline_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::JobService::Stub> jobs_;
  std::unique_ptr<v1::NodeService::Stub> nodes_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
};

}  // namespace

std::unique_ptr<CoordinatorClient> ConnectCoordinator(const std::string& address,
                                                      absl::Duration deadline) {
  return std::make_unique<GrpcCoordinatorClient>(address, deadline);
}

}  // namespace upipe::client
