// upipe-coordinator as a process: jobs through their states with invented workers, kill -9 and
// adoption, refusals.
#include "tests/e2e/coordinator/coordinator_daemon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "upipe/v1/rpc_error.pb.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

TEST_F(CoordinatorDaemon, TakesAJobToItsEnd) {
  const auto a = Worker("a");
  const auto b = Worker("b");
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 4), "request-1", &job).ok());
  v1::WatchRequest watch;
  watch.set_id(job.id());
  grpc::ClientContext context;
  const auto stream = jobs_->Watch(&context, watch);
  v1::WatchResponse response;
  v1::Job last;
  bool reported = false;
  while (stream->Read(&response)) {
    if (response.has_job()) last = response.job();
    reported = reported || response.report().step() == 1;
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(last.state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_TRUE(reported);
  std::vector<std::string> kinds;
  for (const v1::JobEvent& event : last.events()) kinds.push_back(event.kind());
  EXPECT_THAT(kinds, ::testing::ElementsAre("PLANNING", "QUEUED", "STARTING", "RUNNING", "STOPPING",
                                            "SUCCEEDED"));
  EXPECT_TRUE(Eventually([&] { return StepLines(job.id()) == 1; }));
  v1::Job again;  // the same intent answers with the same job and starts nothing
  ASSERT_TRUE(Submit(Spec("good", 4), "request-1", &again).ok());
  EXPECT_EQ(again.id(), job.id());
  EXPECT_EQ(again.generation(), 1);
  const v1::ListNodesResponse nodes = Nodes();
  for (const v1::Node& node : nodes.nodes()) {
    for (const v1::Slot& slot : node.slots()) EXPECT_EQ(slot.state(), v1::SLOT_STATE_FREE);
  }
}

TEST_F(CoordinatorDaemon, RefusesInWords) {
  const auto a = Worker("a");
  v1::Job job;
  grpc::Status status = Submit(Spec("big", 5), "big", &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), ::testing::AllOf(HasSubstr("5 ranks"), HasSubstr("2 slots")));
  v1::JobSpec wrong = Spec("wrong", 2);
  wrong.mutable_model()->set_num_kv_heads(3);
  status = Submit(wrong, "wrong", &job);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  google::rpc::Status details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  google::rpc::BadRequest bad;
  bool found = false;
  for (const auto& any : details.details()) found = found || any.UnpackTo(&bad);
  ASSERT_TRUE(found);
  EXPECT_EQ(bad.field_violations(0).field(), "spec.model.num_kv_heads");
  EXPECT_EQ(Submit(Spec("good", 1), "", &job).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(Submit(Spec("refuse", 1), "refuse", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_FAILED));
  EXPECT_EQ(Get(job.id()).cause().kind(), v1::CAUSE_KIND_PLAN_REFUSED);
  EXPECT_THAT(Get(job.id()).cause().message(), HasSubstr("12345"));
  ASSERT_TRUE(Submit(Spec("crash", 1), "crash", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_FAILED));
  EXPECT_THAT(Get(job.id()).cause().message(),
              ::testing::AllOf(HasSubstr("2 times"), HasSubstr("signal 6")));
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  EXPECT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
}

TEST_F(CoordinatorDaemon, CancelsWhilePlanningAndWhileRunning) {
  const auto a = Worker("a", /*finish=*/false);
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("loop", 2), "loop", &job).ok());
  EXPECT_EQ(Cancel(job.id()).state(), v1::JOB_STATE_CANCELLED);
  ASSERT_TRUE(Submit(Spec("good", 2), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  EXPECT_EQ(Cancel(job.id()).shown_state(), "CANCELLING");
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_CANCELLED));
  EXPECT_EQ(a->num_live(), 0);
  EXPECT_EQ(Cancel(job.id()).state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(CoordinatorDaemon, ARankDiesAndTheJobSaysWhy) {
  const auto a = Worker("a", /*finish=*/false);
  v1::Job job;
  ASSERT_TRUE(Submit(SpecWithoutRestarts("good", 2), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  a->EndRank(1, 3);
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_FAILED));
  const v1::Cause cause = Get(job.id()).cause();
  EXPECT_EQ(cause.kind(), v1::CAUSE_KIND_EXIT_CODE);
  EXPECT_EQ(cause.rank(), 1);
  EXPECT_EQ(cause.exit_code(), 3);
  EXPECT_EQ(cause.node(), "a");
  EXPECT_THAT(cause.log_tail(), ::testing::ElementsAre("last words"));
  EXPECT_EQ(a->num_live(), 0);
}

TEST_F(CoordinatorDaemon, RelaysLogs) {
  const auto a = Worker("a");
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 1), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
  v1::LogsRequest request;
  request.set_id(job.id());
  grpc::ClientContext context;
  const auto stream = jobs_->Logs(&context, request);
  std::string text;
  v1::LogsResponse response;
  while (stream->Read(&response)) text += response.data();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(text, "line 0\nline 1\nline 2\n");
  grpc::ClientContext bad_context;
  request.set_rank(7);
  const auto bad = jobs_->Logs(&bad_context, request);
  while (bad->Read(&response)) {
  }
  EXPECT_EQ(bad->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(CoordinatorDaemon, RelaysTheFileThatIsAskedForAndSendsItsOwn) {
  auto a = Worker("a");
  v1::Job job;
  ASSERT_TRUE(Submit(Spec("good", 2), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_SUCCEEDED));
  v1::LogsRequest request;
  request.set_id(job.id());
  const auto read = [&](std::string* text) {
    grpc::ClientContext context;
    const auto stream = jobs_->Logs(&context, request);
    v1::LogsResponse response;
    text->clear();
    while (stream->Read(&response)) *text += response.data();
    return stream->Finish();
  };
  std::string text;
  request.set_file(v1::RANK_FILE_STEPS);
  EXPECT_TRUE(read(&text).ok());
  EXPECT_EQ(text, "step 0\nstep 1\nstep 2\n");
  a.reset();  // the coordinator's own file needs no worker
  request.set_file(v1::RANK_FILE_JOB_STEPS);
  ASSERT_TRUE(Eventually([&] { return read(&text).ok() && absl::EndsWith(text, "\n"); }));
  EXPECT_THAT(text, ::testing::StartsWith("{\"rank\":0,\"step\":1,"));
  const std::string whole = text;
  request.set_offset(-5);
  EXPECT_TRUE(read(&text).ok());
  EXPECT_EQ(text, whole.substr(whole.size() - 5));
  request.set_offset(1 << 30);
  EXPECT_TRUE(read(&text).ok());
  EXPECT_EQ(text, "");
  request.set_offset(0);
  request.set_follow(true);
  EXPECT_EQ(read(&text).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_follow(false);
  request.set_file(static_cast<v1::RankFile>(77));
  const grpc::Status unknown = read(&text);
  EXPECT_EQ(unknown.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_file(v1::RANK_FILE_JOB_STEPS);
  request.set_id("nobody-abcdef");
  EXPECT_EQ(read(&text).error_code(), grpc::StatusCode::NOT_FOUND);
  ASSERT_TRUE(Submit(Spec("good", 2), "waiting", &job).ok());  // no worker: no step
  request.set_id(job.id());
  const grpc::Status none = read(&text);
  EXPECT_EQ(none.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(none.error_message(), ::testing::HasSubstr("no step of job"));
}

TEST_F(CoordinatorDaemon, ALostWorkerEndsTheJobAndItsSlotsStayUnknown) {
  auto a = Worker("a", /*finish=*/false);
  v1::Job job;
  ASSERT_TRUE(Submit(SpecWithoutRestarts("good", 2), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  a.reset();
  ASSERT_TRUE(Eventually([&] { return Nodes().nodes(0).state() == v1::NODE_STATE_LOST; }));
  EXPECT_EQ(Nodes().nodes(0).slots(0).state(), v1::SLOT_STATE_UNKNOWN);
  const v1::Job ended = Get(job.id());
  EXPECT_EQ(ended.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(ended.cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(ended.ranks(0).state(), v1::RANK_STATE_PRESUMED_GONE);
  a = Worker("a", false, "second");
  EXPECT_EQ(Nodes().nodes(0).slots(0).state(), v1::SLOT_STATE_FREE);
}

TEST_F(CoordinatorDaemon, SurvivesKillAndStopsOrphansOfNobody) {
  auto a = Worker("a", /*finish=*/false);
  v1::Job job;
  ASSERT_TRUE(Submit(SpecWithoutRestarts("good", 2), "good", &job).ok());
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_RUNNING));
  Stop(SIGKILL);
  Start();
  EXPECT_EQ(Get(job.id()).state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Nodes().coordinator_epoch(), 2);
  EXPECT_EQ(Nodes().nodes(0).state(), v1::NODE_STATE_UNKNOWN);
  EXPECT_EQ(Nodes().nodes(0).slots(0).state(), v1::SLOT_STATE_UNKNOWN);
  a = Worker("a", false, "second");  // a new incarnation proves the old ranks gone
  ASSERT_TRUE(Reaches(job.id(), v1::JOB_STATE_FAILED));
  EXPECT_EQ(Get(job.id()).cause().kind(), v1::CAUSE_KIND_NODE_LOST);
  EXPECT_EQ(WEXITSTATUS(Stop(SIGTERM)), 0);
}

TEST_F(CoordinatorDaemon, ASecondOneOnTheSameStateIsRefused) {
  const pid_t second = Spawn();
  int status = 0;
  waitpid(second, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace upipe::coordinator
