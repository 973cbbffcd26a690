// Tells of every call that a server has answered: its method, code and time. Streams are told of at
// their end.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <utility>

#include "coordinator/rpc/server.h"

namespace upipe::coordinator {

class CallMeterFactory : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  using OnCall = decltype(Server::Options::on_call);
  explicit CallMeterFactory(OnCall on_call) : on_call_(std::move(on_call)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* info) override;

 private:
  const OnCall on_call_;
};

}  // namespace upipe::coordinator
