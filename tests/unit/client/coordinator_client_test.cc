// The gRPC client against a real server on loopback: errors in words, streams ended from either
// side.
#include "client/rpc/coordinator_client.h"

#include <gmock/gmock.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/errors/rpc_error.h"
#include "upipe/v1/job_service.grpc.pb.h"
#include "upipe/v1/node_service.grpc.pb.h"

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
      const WireError error = EncodeError(
          InvalidFields(Reason::kSpecInvalid,
                        {{"spec.parallel.heads_per_stage", "6 is not a multiple of the 4 ranks"}}));
      return grpc::Status(grpc::INVALID_ARGUMENT, error.message, error.details);
    }
    if (request->request_id() == "full") {
      const WireError error = EncodeError(RpcError(Reason::kCoordinatorBusy, "too many wait"));
      return grpc::Status(grpc::UNAVAILABLE, error.message, error.details);
    }
    response->mutable_job()->set_id("demo-abcdef");
    return grpc::Status::OK;
  }
  grpc::Status ListJobs(grpc::ServerContext*, const v1::ListJobsRequest* request,
                        v1::ListJobsResponse* response) override {
    for (const std::string id : {"demo-aaaaaa", "demo-bbbbbb", "tiny-cccccc"}) {
      if (id.starts_with(request->id_prefix())) response->add_jobs()->set_id(id);
    }
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

TEST_F(CoordinatorClientTest, ReasonAndFieldViolationsComeThrough) {
  const auto job = Submit("bad");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(HasReason(job.status(), Reason::kSpecInvalid));
  const std::vector<FieldViolation> violations = FieldViolationsOf(job.status());
  ASSERT_EQ(violations.size(), 1u);
  EXPECT_EQ(violations[0].field, "spec.parallel.heads_per_stage");
  EXPECT_EQ(violations[0].description, "6 is not a multiple of the 4 ranks");
}

TEST_F(CoordinatorClientTest, AnUnreachableCoordinatorIsNamed) {
  server_->Shutdown();
  const auto job = Submit("good");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(job.status().message()),
              StartsWith(absl::StrCat("cannot reach the coordinator at ", address_)));
  EXPECT_TRUE(HasReason(job.status(), Reason::kCoordinatorUnreachable));
  EXPECT_EQ(ErrorInfoOf(job.status()).metadata().at("address"), address_);
}

TEST_F(CoordinatorClientTest, ItsOwnUnavailableKeepsItsWords) {
  const auto job = Submit("full");
  EXPECT_EQ(job.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(job.status().message(), "too many wait");
  EXPECT_TRUE(HasReason(job.status(), Reason::kCoordinatorBusy));
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

// A real bash that has sourced the script, with the real program behind it.
class BashCompletion : public CoordinatorClientTest {
 protected:
  // What `words`, the last one unfinished, may become; one a line.
  std::string Complete(const std::string& words) {
    const std::string script = absl::StrCat(
        "PATH=", std::getenv("UPIPE_BIN_DIR"), ":$PATH; export UPIPE_COORDINATOR=", address_,
        "; source <(upipe completion bash) || exit 1; compopt() { echo \"compopt $*\"; }; ",
        "COMP_WORDS=(upipe ", words, "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); ",
        "$(complete -p upipe | sed 's/.*-F \\([^ ]*\\).*/\\1/'); ",
        "printf '%s\\n' \"${COMPREPLY[@]}\"");
    const std::string command =
        absl::StrCat("bash --norc -c '", absl::StrReplaceAll(script, {{"'", "'\\''"}}), "'");
    std::string output;
    FILE* pipe = popen(command.c_str(), "r");
    char chunk[4096];
    while (const size_t size = fread(chunk, 1, sizeof(chunk), pipe)) output.append(chunk, size);
    EXPECT_EQ(pclose(pipe), 0);
    return output;
  }
};

TEST_F(BashCompletion, CompletesVerbsOptionsStatesJobsAndFiles) {
  EXPECT_EQ(Complete("wa"), "watch\nwait\n");
  EXPECT_EQ(Complete("local ''"), "up\ndown\nstatus\n");
  EXPECT_EQ(Complete("list --si"), "--since\n");
  EXPECT_EQ(Complete("list --state r"), "running\n");
  EXPECT_EQ(Complete("list -o j"), "json\n");
  EXPECT_EQ(Complete("logs -f demo"), "demo-aaaaaa\ndemo-bbbbbb\n");
  EXPECT_EQ(Complete("cancel ''"), "demo-aaaaaa\ndemo-bbbbbb\ntiny-cccccc\n");
  EXPECT_EQ(Complete("completion z"), "zsh\n");
  EXPECT_EQ(Complete("submit ''"), "compopt -o default\n\n");
  EXPECT_EQ(Complete("plan ''"), "compopt -o default\n\n");
  EXPECT_EQ(Complete("cancel nobody"), "\n");
}

// Where zsh and fish are installed, they read their scripts.
TEST_F(BashCompletion, OtherShellsParseTheirScripts) {
  int seen = 0;
  for (const std::string shell : {"zsh", "fish"}) {
    const std::string command = absl::StrCat("command -v ", shell, " > /dev/null || exit 77; ",
                                             std::getenv("UPIPE_BIN_DIR"), "/upipe completion ",
                                             shell, " | ", shell, " -n 2>&1");
    FILE* pipe = popen(command.c_str(), "r");
    const int code = WEXITSTATUS(pclose(pipe));
    if (code == 77) continue;
    ++seen;
    EXPECT_EQ(code, 0) << shell;
  }
  if (seen == 0) GTEST_SKIP() << "neither zsh nor fish is installed";
}

TEST_F(BashCompletion, AnAbsentCoordinatorIsSilence) {
  server_->Shutdown();
  EXPECT_EQ(Complete("logs ''"), "\n");
}

}  // namespace
}  // namespace upipe::client
