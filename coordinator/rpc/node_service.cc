// NodeService: what an operator asks of workers.
#include "coordinator/rpc/services.h"
#include "coordinator/rpc/unary_calls.h"

namespace upipe::coordinator {

grpc::ServerUnaryReactor* NodeServiceReactors::ListNodes(grpc::CallbackServerContext* context,
                                                         const v1::ListNodesRequest*,
                                                         v1::ListNodesResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  PostOrRefuse(loop_, reactor, ListNodesCall{Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* NodeServiceReactors::Cordon(grpc::CallbackServerContext* context,
                                                      const v1::CordonRequest* request,
                                                      v1::CordonResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, CordonCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* NodeServiceReactors::Drain(grpc::CallbackServerContext* context,
                                                     const v1::DrainRequest* request,
                                                     v1::DrainResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, DrainCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* NodeServiceReactors::Uncordon(grpc::CallbackServerContext* context,
                                                        const v1::UncordonRequest* request,
                                                        v1::UncordonResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, UncordonCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* NodeServiceReactors::FenceNode(grpc::CallbackServerContext* context,
                                                         const v1::FenceNodeRequest* request,
                                                         v1::FenceNodeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, FenceNodeCall{*request, Answer(reactor, response)});
  return reactor;
}

grpc::ServerUnaryReactor* NodeServiceReactors::ForgetNode(grpc::CallbackServerContext* context,
                                                          const v1::ForgetNodeRequest* request,
                                                          v1::ForgetNodeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  CheckAndPost(loop_, reactor, ForgetNodeCall{*request, Answer(reactor, response)});
  return reactor;
}

}  // namespace upipe::coordinator
