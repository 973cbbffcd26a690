#include "coordinator/rpc/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/loopback.h"
#include "common/status.h"
#include "coordinator/rpc/admin_service.h"
#include "coordinator/rpc/call_meter.h"
#include "coordinator/rpc/services.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxConnectionAgeMillis = 30 * 60 * 1000;
constexpr int kMaxConnectionAgeGraceMillis = 10 * 1000;
constexpr int kKeepaliveMillis = 20 * 1000;
constexpr int kKeepaliveTimeoutMillis = 20 * 1000;
constexpr int kMinPeerPingMillis = 5 * 1000;

// host of "host:port" or "[v6]:port".
std::string HostOf(const std::string& listen) { return listen.substr(0, listen.rfind(':')); }

}  // namespace

struct Server::Parts {
  Parts(Loop& loop, LogRelay& logs, BackupThread& backups)
      : jobs(loop, logs), nodes(loop), workers(loop, logs), admin(backups) {}
  JobServiceReactors jobs;
  NodeServiceReactors nodes;
  WorkerServiceReactors workers;
  AdminServiceReactors admin;
  std::unique_ptr<grpc::Server> server;
};

Server::Server(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Server::~Server() { Shutdown(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<Server>> Server::Listen(const Options& options, Loop& loop,
                                                       LogRelay& logs, BackupThread& backups) {
  UPIPE_RETURN_IF_ERROR(CheckListen(options.listen, options.insecure_listen));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  auto parts = std::make_unique<Parts>(loop, logs, backups);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(options.listen, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kMaxConnectionAgeMillis);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS, kMaxConnectionAgeGraceMillis);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMillis);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMillis);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             kMinPeerPingMillis);
  builder.RegisterService(&parts->jobs);
  builder.RegisterService(&parts->nodes);
  builder.RegisterService(&parts->workers);
  builder.RegisterService(&parts->admin);
  if (options.on_call) {
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> meters;
    meters.push_back(std::make_unique<CallMeterFactory>(options.on_call));
    builder.experimental().SetInterceptorCreators(std::move(meters));
  }
  parts->server = builder.BuildAndStart();
  if (parts->server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", options.listen,
                                               "; is another process using this address?"));
  }
  std::unique_ptr<Server> server(new Server(std::move(parts)));
  server->address_ = absl::StrCat(HostOf(options.listen), ":", port);
  return server;
}

void Server::Shutdown(absl::Duration patience) {
  if (parts_->server == nullptr) return;
  parts_->server->Shutdown(absl::ToChronoTime(absl::Now() + patience));
  parts_->server->Wait();
  parts_->server.reset();
}

}  // namespace upipe::coordinator
