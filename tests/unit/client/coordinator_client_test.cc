// The gRPC client against a real server on loopback: errors in words, streams ended from either
// side.
#include "client/rpc/coordinator_client.h"

#include <gmock/gmock.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "upipe/v1/job_service.grpc.pb.h"
#include "upipe/v1/node_service.grpc.pb.h"
#include "upipe/v1/rpc_error.pb.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

class TestJobService : public v1::JobService::Service {
 public:
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest* request,
                      v1::SubmitResponse* response) override {
    if (request->request_id() == "bad") {
      google::rpc::BadRequest bad_request;
      auto& violation = *bad_request.add_field_violations();
      violation.set_field("parallel.heads_per_stage");
      violation.set_description("6 is not a multiple of the 4 ranks");
      google::rpc::Status details;
      details.add_details()->PackFrom(bad_request);
      return grpc::Status(grpc::INVALID_ARGUMENT, "the spec is wrong", details.SerializeAsString());
    }
    if (request->request_id() == "full") {
      google::rpc::Status details;
      details.set_message("the disk is full");
      return grpc::Status(grpc::UNAVAILABLE, "the disk is full", details.SerializeAsString());
    }
    response->mutable_job()->set_id("demo-abcdef");
    return grpc::Status::OK;
  }
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override {
    v1::WatchResponse message;
    message.mutable_job()->set_id(request->id());
    if (request->id() == "short") {
      writer->Write(message);
      return grpc::Status::OK;
    }
    if (request->id() == "dropped") return grpc::Status::CANCELLED;
    while (!context->IsCancelled() && writer->Write(message)) {
    }
    return grpc::Status::CANCELLED;
  }
};

class CoordinatorClientTest : public testing::Test {
 protected:
  void SetUp() override {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&jobs_);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
    client_ = ConnectCoordinator(address_);
  }

  absl::StatusOr<v1::Job> Submit(const std::string& request_id) {
    v1::SubmitRequest request;
    request.set_request_id(request_id);
    return client_->Submit(request);
  }

  TestJobService jobs_;
  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::unique_ptr<CoordinatorClient> client_;
};

TEST_F(CoordinatorClientTest, AnswersComeThrough) {
  const auto job = Submit("good");
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->id(), "demo-abcdef");
}

TEST_F(CoordinatorClientTest, FieldViolationsAreListed) {
  const auto job = Submit("bad");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(job.status().message(),
            "the spec is wrong\nparallel.heads_per_stage: 6 is not a multiple of the 4 ranks");
}

TEST_F(CoordinatorClientTest, AnUnreachableCoordinatorIsNamed) {
  server_->Shutdown();
  const auto job = Submit("good");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(job.status().message()),
              StartsWith(absl::StrCat("cannot reach the coordinator at ", address_)));
}

TEST_F(CoordinatorClientTest, ItsOwnUnavailableKeepsItsWords) {
  const auto job = Submit("full");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(job.status().message(), "the disk is full");
}

TEST_F(CoordinatorClientTest, AMethodTheServerLacksIsAnError) {
  EXPECT_EQ(client_->ListNodes().status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(CoordinatorClientTest, WatchEndsWithTheServer) {
  int messages = 0;
  const auto count = [&](const v1::WatchResponse& message) {
    EXPECT_EQ(message.job().id(), "short");
    ++messages;
    return true;
  };
  EXPECT_TRUE(client_->Watch("short", absl::InfiniteDuration(), count).ok());
  EXPECT_EQ(messages, 1);
}

TEST_F(CoordinatorClientTest, WatchEndsWhenTheReaderHasEnough) {
  int messages = 0;
  EXPECT_TRUE(client_
                  ->Watch("endless", absl::InfiniteDuration(),
                          [&](const v1::WatchResponse&) { return ++messages < 3; })
                  .ok());
  EXPECT_EQ(messages, 3);
}

// A server that shuts down cancels the calls it still has.
TEST_F(CoordinatorClientTest, ACallTheServerCancelsIsAnOutage) {
  const absl::Status status = client_->Watch("dropped", absl::InfiniteDuration(),
                                             [](const v1::WatchResponse&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
}

TEST_F(CoordinatorClientTest, WatchEndsAtItsLimit) {
  const absl::Status status = client_->Watch("endless", absl::Milliseconds(50),
                                             [](const v1::WatchResponse&) { return true; });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
}

}  // namespace
}  // namespace upipe::client
