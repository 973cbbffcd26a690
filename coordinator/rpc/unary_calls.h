// How a unary call waits in the loop for its answer. Private to the services of this folder.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <utility>

#include "coordinator/rpc/grpc_status.h"
#include "coordinator/rpc/request_checks.h"
#include "coordinator/runtime/loop.h"

namespace upipe::coordinator {

// An answer that fills `response` and finishes the call.
template <typename T>
Done<T> Answer(grpc::ServerUnaryReactor* reactor, T* response) {
  return [reactor, response](absl::StatusOr<T> result) {
    if (result.ok()) *response = *std::move(result);
    reactor->Finish(ToGrpc(result.status()));
  };
}

template <typename Call>
void PostOrRefuse(Loop& loop, grpc::ServerUnaryReactor* reactor, Call call) {
  if (!loop.Post(std::move(call))) reactor->Finish(ToGrpc(Busy()));
}

// Hands over a call whose request looks right; answers the others here.
template <typename Call>
void CheckAndPost(Loop& loop, grpc::ServerUnaryReactor* reactor, Call call) {
  const absl::Status wrong = CheckRequest(call.request);
  if (!wrong.ok()) return reactor->Finish(ToGrpc(wrong));
  PostOrRefuse(loop, reactor, std::move(call));
}

}  // namespace upipe::coordinator
