// A health port in a process that serves no other gRPC.
#include "common/rpc/health_server.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace upipe {
namespace {

// "SERVING", "NOT_SERVING" or how the call failed, as a kubelet asks.
std::string HealthOf(const HealthServer& health, const std::string& service,
                     const std::string& method = "/grpc.health.v1.Health/Check") {
  grpc::GenericStub stub(grpc::CreateChannel(health.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(15));
  grpc::CompletionQueue queue;
  const grpc::Slice request(absl::StrCat("\x0a", std::string(1, static_cast<char>(service.size())),
                                         service));  // field 1, a string
  const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&request, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer bytes;
  grpc::Status status;
  call->Finish(&bytes, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  grpc::Slice answer;
  if (!status.ok() || !bytes.DumpToSingleSlice(&answer).ok())
    return absl::StrCat("code ", static_cast<int>(status.error_code()));
  return std::string(answer.begin(), answer.end()) == "\x08\x01" ? "SERVING" : "NOT_SERVING";
}

TEST(HealthServer, TellsLifeFromReadiness) {
  auto health = HealthServer::Listen("127.0.0.1:0", false);
  ASSERT_TRUE(health.ok()) << health.status();
  EXPECT_EQ(HealthOf(**health, ""), "SERVING");
  EXPECT_EQ(HealthOf(**health, "a.Service"), "code 5");  // NOT_FOUND
  (*health)->SetServing("a.Service", true);
  EXPECT_EQ(HealthOf(**health, "a.Service"), "SERVING");
  (*health)->SetServing("a.Service", false);
  EXPECT_EQ(HealthOf(**health, "a.Service"), "NOT_SERVING");
  EXPECT_EQ(HealthOf(**health, ""), "SERVING");
  EXPECT_EQ(HealthOf(**health, "", "/made.Up/Call"), "code 12");  // UNIMPLEMENTED
}

TEST(HealthServer, StaysOnLoopbackUnlessTold) {
  EXPECT_EQ(HealthServer::Listen("0.0.0.0:0", false).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(HealthServer::Listen("127.0.0.1:99999", false).status().code(),
            absl::StatusCode::kInvalidArgument);
  const auto taken = HealthServer::Listen("127.0.0.1:0", false);
  ASSERT_TRUE(taken.ok());
  EXPECT_EQ(HealthServer::Listen((*taken)->address(), false).status().code(),
            absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace upipe
