#include "client/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/unit/client/fake_coordinator.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

v1::Job JobIn(v1::JobState state, const std::string& id = "demo-abcdef") {
  v1::Job job;
  job.set_id(id);
  job.set_state(state);
  job.set_started_unix_millis(1769847330000);
  if (state == v1::JOB_STATE_SUCCEEDED) job.set_ended_unix_millis(1769847335000);
  return job;
}

v1::WatchResponse Says(const v1::Job& job) {
  v1::WatchResponse message;
  *message.mutable_job() = job;
  return message;
}

v1::WatchResponse Step(int64_t step, double loss) {
  v1::WatchResponse message;
  v1::StepReport& report = *message.mutable_report();
  report.set_step(step);
  report.set_total_steps(60);
  report.set_loss(loss);
  report.set_tokens_per_second(1234);
  report.set_step_seconds(2);
  return message;
}

class CommandsTest : public testing::Test {
 protected:
  std::string Sample() {
    return absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/deploy/samples/demo.yaml");
  }

  FakeCoordinator coordinator_;
  ManualClock clock_;
  std::ostringstream out_, err_;
  std::vector<absl::Duration> pauses_;
  Console console_{coordinator_,
                   out_,
                   err_,
                   clock_,
                   [this](absl::Duration d) {
                     pauses_.push_back(d);
                     clock_.now += d;
                   },
                   std::nullopt};
};

TEST_F(CommandsTest, SubmitChecksTheFileBeforeAskingAnyone) {
  EXPECT_EQ(Submit(console_, {.path = "/nonexistent.yaml"}), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("/nonexistent.yaml"));
  EXPECT_EQ(Submit(console_, {.path = Sample(),
                              .overrides = {"parallel.heads_per_stage=6", "train.steps=x"}}),
            kExitWrongRequest);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("'x' is not a whole number"),
                                HasSubstr("6 is not a multiple of the 4 ranks")));
  EXPECT_THAT(coordinator_.submitted, IsEmpty());
}

TEST_F(CommandsTest, SubmitPrintsProgressOrOneMessageNotBoth) {
  EXPECT_EQ(Submit(console_, {.path = Sample(), .watch = true, .json = true}), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("choose one"));
  EXPECT_THAT(coordinator_.submitted, IsEmpty());
}

TEST_F(CommandsTest, SubmitAwaitsThePlan) {
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_PLANNING)};
  v1::Job queued = JobIn(v1::JOB_STATE_QUEUED);
  queued.set_reason("needs 4 slots, 2 are free");
  coordinator_.watches = {
      {{Says(JobIn(v1::JOB_STATE_PLANNING)), Says(queued)}, absl::OkStatus(), nullptr}};
  EXPECT_EQ(Submit(console_, {.path = Sample(), .overrides = {"data.path=some/../data"}}),
            kExitDone);
  EXPECT_EQ(out_.str(), "demo-abcdef  QUEUED  needs 4 slots, 2 are free\n");
  ASSERT_THAT(coordinator_.submitted, SizeIs(1));
  EXPECT_THAT(coordinator_.submitted[0].spec().data().path(),
              AllOf(testing::StartsWith("/"), testing::EndsWith("/data"), Not(HasSubstr(".."))));
  EXPECT_THAT(coordinator_.submitted[0].request_id(), SizeIs(32));
}

TEST_F(CommandsTest, ARefusedPlanIsAFailureInOneSentence) {
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_PLANNING)};
  v1::Job failed = JobIn(v1::JOB_STATE_FAILED);
  failed.mutable_cause()->set_message("peak of rank 0 is 2.0 GiB, the worker offers 1.0 GiB");
  coordinator_.watches = {{{Says(failed)}, absl::OkStatus(), nullptr}};
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("peak of rank 0 is 2.0 GiB"));
}

TEST_F(CommandsTest, SubmitRepeatsTheSameRequestWhileTheCoordinatorIsAway) {
  coordinator_.submit_answers = {absl::UnavailableError("cannot reach the coordinator at h:1"),
                                 absl::DeadlineExceededError("slow"), JobIn(v1::JOB_STATE_QUEUED)};
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitDone);
  ASSERT_THAT(coordinator_.submitted, SizeIs(3));
  EXPECT_EQ(coordinator_.submitted[0].request_id(), coordinator_.submitted[2].request_id());
  EXPECT_THAT(pauses_, ElementsAre(absl::Milliseconds(200), absl::Milliseconds(400)));
}

TEST_F(CommandsTest, SubmitGivesUpOnACoordinatorThatStaysAway) {
  coordinator_.submit_answers = {absl::UnavailableError("cannot reach the coordinator at h:1")};
  EXPECT_EQ(Submit(console_, {.path = Sample(), .request_id = "mine"}), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("cannot reach the coordinator at h:1"));
  EXPECT_EQ(coordinator_.submitted.back().request_id(), "mine");
  EXPECT_LT(coordinator_.submitted.size(), 20u);
}

TEST_F(CommandsTest, SubmitDoesNotRepeatARefusal) {
  coordinator_.submit_answers = {absl::ResourceExhaustedError("8 ranks asked, 4 slots exist")};
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitFailed);
  EXPECT_THAT(coordinator_.submitted, SizeIs(1));
  EXPECT_EQ(err_.str(), "upipe: 8 ranks asked, 4 slots exist\n");
}

TEST_F(CommandsTest, JsonIsTheMessageWithProtoNames) {
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_QUEUED)};
  EXPECT_EQ(Submit(console_, {.path = Sample(), .json = true}), kExitDone);
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json.at("id"), "demo-abcdef");
  EXPECT_EQ(json.at("state"), "JOB_STATE_QUEUED");
  EXPECT_EQ(json.at("submitted_unix_millis"), "0");
}

TEST_F(CommandsTest, JobsAreFoundByUniqueBeginning) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING, "demo-aaaaaa"),
                       JobIn(v1::JOB_STATE_RUNNING, "demo-bbbbbb"),
                       JobIn(v1::JOB_STATE_RUNNING, "tiny-cccccc"),
                       JobIn(v1::JOB_STATE_RUNNING, "tiny-cccccc-dddddd")};
  EXPECT_EQ(Cancel(console_, "demo-b"), kExitDone);
  EXPECT_EQ(Cancel(console_, "tiny-cccccc"), kExitDone);  // exact, though it begins another
  EXPECT_THAT(coordinator_.cancelled, ElementsAre("demo-bbbbbb", "tiny-cccccc"));
  EXPECT_EQ(Cancel(console_, "demo"), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("'demo' begins the ids of 2 jobs: demo-aaaaaa, demo-bbbbbb"));
  EXPECT_EQ(Describe(console_, "nope", false), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("no job's id is or begins with 'nope'"));
  EXPECT_THAT(coordinator_.cancelled, SizeIs(2));
}

// `upipe cancel "$JOB"` with the variable unset.
TEST_F(CommandsTest, AnEmptyIdIsNoBeginning) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING, "demo-aaaaaa")};
  EXPECT_EQ(Cancel(console_, ""), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("the job's id is empty"));
  EXPECT_THAT(coordinator_.cancelled, SizeIs(0));
}

TEST_F(CommandsTest, ListReadsEveryPage) {
  for (const char* id : {"a-aaaaaa", "b-bbbbbb", "c-cccccc", "d-dddddd", "e-eeeeee"}) {
    coordinator_.jobs.push_back(JobIn(v1::JOB_STATE_RUNNING, id));
  }
  EXPECT_EQ(List(console_, true), kExitDone);
  EXPECT_EQ(nlohmann::json::parse(out_.str()).at("jobs").size(), 5u);
}

TEST_F(CommandsTest, WaitReturnsTheOutcome) {
  const std::pair<v1::JobState, int> outcomes[] = {{v1::JOB_STATE_SUCCEEDED, kExitDone},
                                                   {v1::JOB_STATE_FAILED, kExitFailed},
                                                   {v1::JOB_STATE_CANCELLED, kExitCancelled}};
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  for (const auto& [state, code] : outcomes) {
    coordinator_.watches = {
        {{Says(JobIn(v1::JOB_STATE_RUNNING)), Says(JobIn(state))}, absl::OkStatus(), nullptr}};
    EXPECT_EQ(Wait(console_, "demo", absl::InfiniteDuration()), code);
  }
}

TEST_F(CommandsTest, WaitEndsAtItsTimeout) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.watches = {{{Says(JobIn(v1::JOB_STATE_RUNNING))},
                           absl::DeadlineExceededError("late"),
                           [this] { clock_.now += absl::Seconds(30); }}};
  EXPECT_EQ(Wait(console_, "demo", absl::Seconds(30)), kExitTimeout);
  EXPECT_THAT(coordinator_.watched, ElementsAre(std::pair("demo-abcdef", absl::Seconds(30))));
  EXPECT_THAT(err_.str(), HasSubstr("job demo-abcdef did not end within 30s; it is RUNNING"));
}

TEST_F(CommandsTest, WatchSurvivesLostConnections) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  const absl::Status lost = absl::UnavailableError("cannot reach the coordinator at h:1");
  coordinator_.watches = {
      {{Says(JobIn(v1::JOB_STATE_RUNNING)), Step(1, 5)}, lost, nullptr},
      {{}, lost, nullptr},
      {{}, lost, nullptr},
      {{Says(JobIn(v1::JOB_STATE_RUNNING)), Step(2, 4)}, absl::OkStatus(), nullptr},
      {{Says(JobIn(v1::JOB_STATE_RUNNING)), Step(60, 3), Says(JobIn(v1::JOB_STATE_SUCCEEDED))},
       absl::OkStatus(),
       nullptr}};
  EXPECT_EQ(Watch(console_, "demo-abcdef"), kExitDone);
  EXPECT_THAT(coordinator_.watched, SizeIs(5));
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("step 60/60  loss 3.0000"),
                                HasSubstr("demo-abcdef SUCCEEDED after 5.0 s")));
  EXPECT_THAT(pauses_, ElementsAre(absl::Milliseconds(200), absl::Milliseconds(400),
                                   absl::Milliseconds(800), absl::Milliseconds(200)));
  EXPECT_EQ(
      err_.str(),
      "cannot reach the coordinator at h:1; trying again for 600 s\n");  // one outage, told once
}

TEST_F(CommandsTest, WatchStopsAtAnErrorThatIsNoOutage) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.watches = {{{}, absl::NotFoundError("no job demo-abcdef"), nullptr}};
  EXPECT_EQ(Watch(console_, "demo-abcdef"), kExitWrongRequest);
  EXPECT_THAT(pauses_, IsEmpty());
}

TEST_F(CommandsTest, WithoutATerminalOneLineASecond) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  FakeCoordinator::WatchScript script{
      {Says(JobIn(v1::JOB_STATE_RUNNING))}, absl::OkStatus(), nullptr};
  for (int step = 1; step <= 9; ++step)
    script.messages.push_back(Step(step, 5));  // all at one moment
  v1::WatchResponse evaluated = Step(10, 5);
  evaluated.mutable_report()->set_held_out_loss(4.5);
  script.messages.push_back(evaluated);
  script.messages.push_back(Says(JobIn(v1::JOB_STATE_CANCELLED)));
  coordinator_.watches = {script};
  EXPECT_EQ(Watch(console_, "demo-abcdef"), kExitCancelled);
  EXPECT_THAT(out_.str(),
              AllOf(Not(HasSubstr("step 3/60")),
                    HasSubstr("step 10/60  loss 5.0000  held-out 4.5000"), Not(HasSubstr("\x1b"))));
}

TEST_F(CommandsTest, OnATerminalTheBlockIsRedrawn) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  console_.terminal_width = 80;
  v1::WatchResponse second = Step(2, 4);
  second.mutable_report()->set_held_out_loss(4.5);
  coordinator_.watches = {
      {{Says(JobIn(v1::JOB_STATE_RUNNING)), second, Says(JobIn(v1::JOB_STATE_SUCCEEDED))},
       absl::OkStatus(),
       nullptr}};
  EXPECT_EQ(Watch(console_, "demo-abcdef"), kExitDone);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("\x1b[1A\x1b[J"), HasSubstr("step 2/60  [#")));
}

v1::LogsResponse Chunk(int64_t offset, const std::string& data, const std::string& gap = "") {
  v1::LogsResponse chunk;
  chunk.set_offset(offset);
  chunk.set_data(data);
  chunk.set_gap(gap);
  return chunk;
}

TEST_F(CommandsTest, LogsResumeWhereTheConnectionBroke) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.logs = {
      {{Chunk(0, "one\n"), Chunk(4, "tw")}, absl::UnavailableError("gone")},
      {{Chunk(6, "o\n"), Chunk(20, "three\n", "bytes 8 to 20 are missing")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .rank = 1, .follow = true}), kExitDone);
  EXPECT_EQ(out_.str(), "one\ntwo\nthree\n");
  EXPECT_THAT(err_.str(), HasSubstr("[bytes 8 to 20 are missing]"));
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 6);
  EXPECT_EQ(coordinator_.log_requests[1].rank(), 1);
  EXPECT_TRUE(coordinator_.log_requests[1].follow());
}

TEST_F(CommandsTest, LogsTailPrintsTheLastLinesThenFollows) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.logs = {{{Chunk(100, "a\nb\n"), Chunk(104, "c\nd\n")}, absl::OkStatus()},
                       {{Chunk(108, "e\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .follow = true, .tail = 3}), kExitDone);
  EXPECT_EQ(out_.str(), "b\nc\nd\ne\n");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[0].offset(), -3 * 512);
  EXPECT_FALSE(coordinator_.log_requests[0].follow());
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 108);
}

TEST_F(CommandsTest, TheTailOfAnEmptyLogIsFollowedFromItsStart) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.logs = {{{Chunk(-512, "")}, absl::OkStatus()},
                       {{Chunk(0, ""), Chunk(0, "first\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .follow = true, .tail = 1}), kExitDone);
  EXPECT_EQ(out_.str(), "first\n");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 0);
}

}  // namespace
}  // namespace upipe::client
