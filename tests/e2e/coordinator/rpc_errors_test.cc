// Every call of the API driven into its errors over real gRPC: each answers with a reason, with
// field paths where fields are wrong. And what reflection tells of the services.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "tests/e2e/coordinator/coordinator_daemon.h"

namespace upipe::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const char* const kBadIds[] = {"", "UPPER", "a b", "new\nline", "esc\x1b[2J", "\xc3\xa9"};

class RpcErrors : public CoordinatorDaemon {
 protected:
  static absl::Status ErrorOf(const grpc::Status& status) {
    return DecodeError(static_cast<absl::StatusCode>(status.error_code()), status.error_message(),
                       status.error_details());
  }
  // Checks that `status` has `reason`, its code, our domain; returns the wrong fields.
  static std::vector<std::string> Expect(Reason reason, const grpc::Status& status) {
    const absl::Status error = ErrorOf(status);
    EXPECT_EQ(error.code(), EntryOf(reason).code) << error;
    EXPECT_EQ(ErrorInfoOf(error).reason(), EntryOf(reason).name) << error;
    EXPECT_EQ(ErrorInfoOf(error).domain(), kErrorDomain);
    EXPECT_NE(status.error_message(), "");
    std::vector<std::string> fields;
    for (const FieldViolation& violation : FieldViolationsOf(error)) {
      fields.push_back(violation.field);
      EXPECT_NE(violation.description, "");
    }
    return fields;
  }

  grpc::Status GetStatus(const std::string& id) {
    v1::GetJobRequest request;
    request.set_id(id);
    v1::Job job;
    grpc::ClientContext context;
    return jobs_->GetJob(&context, request, &job);
  }
  grpc::Status CancelStatus(const std::string& id) {
    v1::CancelRequest request;
    request.set_id(id);
    v1::CancelResponse response;
    grpc::ClientContext context;
    return jobs_->Cancel(&context, request, &response);
  }
  grpc::Status WatchStatus(const std::string& id) {
    v1::WatchRequest request;
    request.set_id(id);
    grpc::ClientContext context;
    const auto stream = jobs_->Watch(&context, request);
    v1::WatchResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }
  // How a call of Hold, Release or Why ends.
  template <typename Response, typename Request>
  grpc::Status JobStatus(grpc::Status (v1::JobService::Stub::*call)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                         const std::string& id) {
    Request request;
    request.set_id(id);
    Response response;
    grpc::ClientContext context;
    return (jobs_.get()->*call)(&context, request, &response);
  }
  template <typename Response, typename Request>
  grpc::Status NodeStatus(grpc::Status (v1::NodeService::Stub::*call)(grpc::ClientContext*,
                                                                      const Request&, Response*),
                          const std::string& worker, Request request = {}) {
    request.set_worker(worker);
    Response response;
    grpc::ClientContext context;
    return (nodes_.get()->*call)(&context, request, &response);
  }
  // Every call of NodeService that names a worker.
  std::vector<grpc::Status> NodeStatuses(const std::string& worker) {
    return {NodeStatus(&v1::NodeService::Stub::Cordon, worker),
            NodeStatus(&v1::NodeService::Stub::Drain, worker),
            NodeStatus(&v1::NodeService::Stub::Uncordon, worker),
            NodeStatus(&v1::NodeService::Stub::FenceNode, worker),
            NodeStatus(&v1::NodeService::Stub::ForgetNode, worker)};
  }
  // Every call of JobService that names a job and nothing else.
  std::vector<grpc::Status> JobStatuses(const std::string& id) {
    return {GetStatus(id),
            CancelStatus(id),
            WatchStatus(id),
            LogsStatus(id),
            JobStatus(&v1::JobService::Stub::Hold, id),
            JobStatus(&v1::JobService::Stub::Release, id),
            JobStatus(&v1::JobService::Stub::Why, id)};
  }
  grpc::Status LogsStatus(const std::string& id, int rank = 0, int64_t generation = 0) {
    v1::LogsRequest request;
    request.set_id(id);
    request.set_rank(rank);
    request.set_generation(generation);
    grpc::ClientContext context;
    const auto stream = jobs_->Logs(&context, request);
    v1::LogsResponse response;
    while (stream->Read(&response)) {
    }
    return stream->Finish();
  }
  grpc::Status ListStatus(const v1::ListJobsRequest& request) {
    v1::ListJobsResponse response;
    grpc::ClientContext context;
    return jobs_->ListJobs(&context, request, &response);
  }
  // Sends one message on a new session and reads until it ends.
  grpc::Status SessionStatus(const v1::WorkerMessage& message) {
    const auto stub = v1::WorkerService::NewStub(channel_);
    grpc::ClientContext context;
    const auto stream = stub->Session(&context);
    stream->Write(message);
    v1::CoordinatorMessage answer;
    while (stream->Read(&answer)) {
    }
    return stream->Finish();
  }
  static v1::WorkerMessage HelloOf(const std::string& worker, const std::string& incarnation) {
    v1::WorkerMessage message;
    v1::Hello& hello = *message.mutable_hello();
    hello.set_worker(worker);
    hello.set_incarnation(incarnation);
    hello.set_state_id(incarnation);
    hello.set_start_number(1);
    hello.set_session_number(1);
    hello.set_num_slots(1);
    hello.set_memory_per_rank_bytes(1 << 20);
    return message;
  }
};

TEST_F(RpcErrors, IdsAreCheckedByEveryCall) {
  std::vector<std::string> bad(std::begin(kBadIds), std::end(kBadIds));
  bad.emplace_back(100'000, 'a');
  for (const std::string& id : bad) {
    for (const grpc::Status& status : JobStatuses(id)) {
      EXPECT_THAT(Expect(Reason::kRequestInvalid, status), ElementsAre("id")) << id.substr(0, 40);
    }
  }
  const std::string unknown = "nobody-aaaaaa";
  for (const grpc::Status& status : JobStatuses(unknown)) {
    EXPECT_THAT(Expect(Reason::kJobNotFound, status), IsEmpty());
    EXPECT_THAT(status.error_message(), HasSubstr(unknown));
  }
}

TEST_F(RpcErrors, WorkersAreCheckedByEveryCall) {
  for (const std::string& worker : {std::string(), std::string(100'000, 'a')}) {
    for (const grpc::Status& status : NodeStatuses(worker)) {
      EXPECT_THAT(Expect(Reason::kRequestInvalid, status), ElementsAre("worker"));
    }
  }
  for (const std::string& worker : {std::string("nobody"), std::string("a\nb\x1b[2J")}) {
    for (const grpc::Status& status : NodeStatuses(worker)) {
      EXPECT_THAT(Expect(Reason::kNodeNotFound, status), IsEmpty());
    }
  }
}

TEST_F(RpcErrors, ReasonsAndGracesHaveBounds) {
  v1::DrainRequest drain;
  drain.set_reason(std::string(501, 'r'));
  drain.set_grace_millis(-1);
  EXPECT_THAT(Expect(Reason::kRequestInvalid, NodeStatus(&v1::NodeService::Stub::Drain, "", drain)),
              ElementsAre("worker", "reason", "grace_millis"));
  v1::CordonRequest cordon;
  cordon.set_reason(std::string(501, 'r'));
  EXPECT_THAT(
      Expect(Reason::kRequestInvalid, NodeStatus(&v1::NodeService::Stub::Cordon, "a", cordon)),
      ElementsAre("reason"));
  for (const int64_t grace : {int64_t{-1}, int64_t{24 * 3600 * 1000 + 1}}) {
    v1::CancelRequest request;
    request.set_id("nobody-aaaaaa");
    request.set_grace_millis(grace);
    v1::CancelResponse response;
    grpc::ClientContext context;
    EXPECT_THAT(Expect(Reason::kRequestInvalid, jobs_->Cancel(&context, request, &response)),
                ElementsAre("grace_millis"));
  }
}

TEST_F(RpcErrors, AJobThatEndedIsNeitherHeldNorReleased) {
  const auto a = Worker("a");
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
  EXPECT_THAT(Expect(Reason::kJobEnded, JobStatus(&v1::JobService::Stub::Hold, job.id())),
              IsEmpty());
  EXPECT_THAT(Expect(Reason::kJobEnded, JobStatus(&v1::JobService::Stub::Release, job.id())),
              IsEmpty());
  EXPECT_EQ(Why(job.id()).reason(), v1::WAIT_REASON_ENDED);
}

TEST_F(RpcErrors, OnlyASilentNodeIsFencedOrForgotten) {
  auto a = Worker("a", /*finish=*/false);
  EXPECT_THAT(Expect(Reason::kNodeNotSilent, NodeStatus(&v1::NodeService::Stub::FenceNode, "a")),
              IsEmpty());
  EXPECT_THAT(Expect(Reason::kNodeNotSilent, NodeStatus(&v1::NodeService::Stub::ForgetNode, "a")),
              IsEmpty());
  EXPECT_EQ(Nodes().nodes_size(), 1);
}

TEST_F(RpcErrors, Submit) {
  v1::Job job;
  for (const std::string& id : {std::string(), std::string(129, 'x'), std::string("a\nb")}) {
    EXPECT_THAT(Expect(Reason::kRequestInvalid, Submit(Spec("good", 1), id, &job)),
                ElementsAre("request_id"));
  }
  v1::JobSpec wrong = Spec("wrong", 2);
  wrong.mutable_model()->set_num_kv_heads(3);
  wrong.mutable_train()->set_steps(0);
  EXPECT_THAT(Expect(Reason::kSpecInvalid, Submit(wrong, "wrong", &job)),
              ElementsAre("spec.model.num_kv_heads", "spec.train.steps"));
  EXPECT_THAT(Expect(Reason::kSpecInvalid, Submit({}, "empty", &job)),
              ::testing::Contains("spec.name"));
  v1::JobSpec huge = Spec(std::string(1 << 20, 'n'), 2);  // its error still fits into a call
  huge.mutable_data()->set_path(std::string(1 << 20, '\x01'));
  EXPECT_THAT(Expect(Reason::kSpecInvalid, Submit(huge, "huge", &job)),
              ::testing::Contains("spec.name"));
  const auto a = Worker("a");
  EXPECT_THAT(Expect(Reason::kSlotsTooFew, Submit(Spec("big", 5), "big", &job)), IsEmpty());
}

TEST_F(RpcErrors, ListJobs) {
  v1::ListJobsRequest request;
  request.set_page_size(-1);
  request.set_page_token("garbage");
  request.add_states(v1::JOB_STATE_UNSPECIFIED);
  request.set_id_prefix(std::string(1 << 20, 'x'));
  request.set_submitted_from_unix_millis(2);
  request.set_submitted_until_unix_millis(1);
  EXPECT_THAT(Expect(Reason::kRequestInvalid, ListStatus(request)),
              ElementsAre("page_size", "page_token", "states[0]", "id_prefix",
                          "submitted_until_unix_millis"));
  EXPECT_TRUE(ListStatus({}).ok());
}

TEST_F(RpcErrors, Logs) {
  v1::Job job;
  ASSERT_TRUE(Submit(SpecWithoutRestarts("good", 2), "good", &job).ok());
  EXPECT_THAT(Expect(Reason::kJobNotStarted, LogsStatus(job.id())), IsEmpty());
  EXPECT_THAT(Expect(Reason::kRequestInvalid, LogsStatus("x!", -1)), ElementsAre("id", "rank"));
  auto a = Worker("a", /*finish=*/false);
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  EXPECT_THAT(Expect(Reason::kRequestInvalid, LogsStatus(job.id(), 2)), ElementsAre("rank"));
  EXPECT_THAT(Expect(Reason::kRequestInvalid, LogsStatus(job.id(), 0, -1)),
              ElementsAre("generation"));
  EXPECT_THAT(Expect(Reason::kRequestInvalid, LogsStatus(job.id(), 0, 2)),
              ElementsAre("generation"));
  EXPECT_TRUE(LogsStatus(job.id(), 1, 1).ok());
  EXPECT_TRUE(LogsStatus(job.id(), 1).ok());
  a.reset();
  // Until the coordinator sees the session's end it asks the worker, and asks in vain: LOG_LATE.
  grpc::Status status;
  ASSERT_TRUE(Eventually([&] {
    status = LogsStatus(job.id());
    return HasReason(ErrorOf(status), Reason::kWorkerDisconnected);
  })) << ErrorOf(status);
  Expect(Reason::kWorkerDisconnected, status);
  ASSERT_TRUE(Eventually([&] { return Nodes().nodes(0).state() == v1::NODE_STATE_LOST; }));
  EXPECT_THAT(Expect(Reason::kWorkerLost, LogsStatus(job.id())), IsEmpty());
}

TEST_F(RpcErrors, Sessions) {
  EXPECT_THAT(Expect(Reason::kRequestInvalid, SessionStatus({})), ElementsAre("kind"));
  v1::WorkerMessage message;
  message.mutable_heartbeat();
  Expect(Reason::kHelloMissing, SessionStatus(message));
  message.mutable_rank();
  Expect(Reason::kHelloMissing, SessionStatus(message));
  message.mutable_progress();
  Expect(Reason::kHelloMissing, SessionStatus(message));
  message.mutable_hello()->set_worker("a b");
  EXPECT_THAT(Expect(Reason::kHelloInvalid, SessionStatus(message)),
              ElementsAre("hello.worker", "hello.num_slots", "hello.incarnation",
                          "hello.state_id", "hello.start_number", "hello.session_number",
                          "hello.memory_per_rank_bytes"));
  message = HelloOf("a", "i");
  message.mutable_hello()->set_epoch(99);
  Expect(Reason::kEpochSuperseded, SessionStatus(message));
  const auto a = Worker("a");
  Expect(Reason::kWorkerNameTaken, SessionStatus(HelloOf("a", "another")));
}

TEST_F(RpcErrors, AnUploadNobodyReads) {
  const auto stub = v1::WorkerService::NewStub(channel_);
  grpc::ClientContext context;
  v1::UploadLogResponse response;
  const auto writer = stub->UploadLog(&context, &response);
  v1::LogChunk chunk;
  chunk.set_request_id("unknown");
  writer->Write(chunk);
  Expect(Reason::kLogUnwanted, writer->Finish());
}

TEST_F(RpcErrors, AWatchThatOutlivesTheCoordinator) {
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  v1::WatchRequest request;
  request.set_id(job.id());
  grpc::ClientContext context;
  const auto stream = jobs_->Watch(&context, request);
  v1::WatchResponse response;
  ASSERT_TRUE(stream->Read(&response));
  Stop(SIGTERM);
  while (stream->Read(&response)) {
  }
  Expect(Reason::kCoordinatorStopping, stream->Finish());
}

// The end of an upload says nothing: its worker may have died.
TEST_F(RpcErrors, ALogWithoutItsLastChunk) {
  const FakeWorker a({.address = address_, .name = "a", .break_logs_off = true});
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
  Expect(Reason::kLogBrokenOff, LogsStatus(job.id()));
}

TEST_F(RpcErrors, ALogThatOutlivesTheCoordinator) {
  const auto a = Worker("a");
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
  v1::LogsRequest request;
  request.set_id(job.id());
  request.set_follow(true);
  grpc::ClientContext context;
  const auto stream = jobs_->Logs(&context, request);
  v1::LogsResponse response;
  ASSERT_TRUE(stream->Read(&response));
  Stop(SIGTERM);
  while (stream->Read(&response)) {
  }
  Expect(Reason::kCoordinatorStopping, stream->Finish());
}

// The wire form of grpc.reflection.v1alpha: a request and the bytes of the answer.
std::string Reflect(const std::shared_ptr<grpc::Channel>& channel, const std::string& request) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(15));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto await = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(nullptr);
  if (!await()) return "";
  const grpc::Slice slice(request);
  call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
  if (!await()) return "";
  grpc::ByteBuffer answer;
  call->Read(&answer, nullptr);
  if (!await()) return "";
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, nullptr);
  await();
  grpc::Slice bytes;
  return answer.DumpToSingleSlice(&bytes).ok()
             ? std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size())
             : "";
}

// One length-delimited field of a message.
std::string Field(int number, const std::string& value) {
  return absl::StrCat(std::string(1, static_cast<char>(number << 3 | 2)),
                      std::string(1, static_cast<char>(value.size())), value);
}

TEST_F(RpcErrors, ReflectionListsAndDescribesTheServices) {
  constexpr int kListServices = 7, kFileContainingSymbol = 4;
  const std::string services = Reflect(channel_, Field(kListServices, "*"));
  for (const char* name : {"upipe.v1.JobService", "upipe.v1.NodeService", "upipe.v1.AdminService",
                           "upipe.v1.WorkerService", "grpc.health.v1.Health",
                           "grpc.reflection.v1alpha.ServerReflection"}) {
    EXPECT_THAT(services, HasSubstr(name));
  }
  const std::string file = Reflect(channel_, Field(kFileContainingSymbol, "upipe.v1.JobService"));
  EXPECT_THAT(file, HasSubstr("upipe/v1/job_service.proto"));
  EXPECT_THAT(file, HasSubstr("ListJobsRequest"));
}

}  // namespace
}  // namespace upipe::coordinator
