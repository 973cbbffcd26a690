#include "common/rpc/health_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include "absl/strings/str_cat.h"
#include "common/loopback.h"
#include "common/status.h"

namespace upipe {

struct HealthServer::Parts {
  grpc::CallbackGenericService others;  // refuses what is not health; without it nothing is polled
  std::unique_ptr<grpc::Server> server;
};

HealthServer::HealthServer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

HealthServer::~HealthServer() {
  parts_->server->Shutdown(std::chrono::system_clock::now());
  parts_->server->Wait();
}

absl::StatusOr<std::unique_ptr<HealthServer>> HealthServer::Listen(const std::string& listen,
                                                                   bool insecure_listen) {
  UPIPE_RETURN_IF_ERROR(CheckListen(listen, insecure_listen));
  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  auto parts = std::make_unique<Parts>();
  builder.RegisterCallbackGenericService(&parts->others);
  parts->server = builder.BuildAndStart();
  if (parts->server == nullptr || port == 0) {
    return absl::UnavailableError(absl::StrCat("cannot serve health on ", listen,
                                               "; is another process using this address?"));
  }
  std::unique_ptr<HealthServer> health(new HealthServer(std::move(parts)));
  health->address_ = absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
  return health;
}

void HealthServer::SetServing(const std::string& service, bool serving) {
  parts_->server->GetHealthCheckService()->SetServingStatus(service, serving);
}

}  // namespace upipe
