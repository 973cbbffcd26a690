#include "client/commands.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "tests/unit/client/console_test.h"

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

class CommandsTest : public ConsoleTest {
 protected:
  std::string Sample() {
    return absl::StrCat(std::getenv("UPIPE_SOURCE_DIR"), "/deploy/samples/demo.yaml");
  }
};

TEST_F(CommandsTest, SubmitChecksTheFileBeforeAskingAnyone) {
  EXPECT_EQ(Submit(console_, {.path = "/nonexistent.yaml"}), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("/nonexistent.yaml"));
  EXPECT_EQ(Submit(console_, {.path = Sample(),
                              .overrides = {"parallel.heads_per_stage=6", "train.steps=x"}}),
            kExitWrongRequest);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("\n--set: train.steps: 'x' is not a whole number"),
                                HasSubstr("6 is not a multiple of the 4 ranks")));
  EXPECT_THAT(coordinator_.submitted, IsEmpty());
}

// Every line of text is one JSON value.
std::vector<nlohmann::json> JsonLines(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST_F(CommandsTest, SubmitAndWatchInJsonIsAMessageALine) {
  console_.json = true;
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_QUEUED)};
  coordinator_.watches = {{{Says(JobIn(v1::JOB_STATE_RUNNING)), Step(1, 5), Step(2, 4),
                            Says(JobIn(v1::JOB_STATE_FAILED))},
                           absl::OkStatus(),
                           nullptr}};
  EXPECT_EQ(Submit(console_, {.path = Sample(), .watch = true}), kExitFailed);
  const std::vector<nlohmann::json> lines = JsonLines(out_.str());
  ASSERT_THAT(lines, SizeIs(4));
  EXPECT_EQ(lines[0].at("job").at("state"), "JOB_STATE_RUNNING");
  EXPECT_EQ(lines[2].at("report").at("loss"), 4);
  EXPECT_EQ(lines[3].at("job").at("state"), "JOB_STATE_FAILED");
  JsonLines(err_.str());
}

TEST_F(CommandsTest, AWatchedJobThatEndsAtOnceIsALineToo) {
  console_.json = true;
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_SUCCEEDED)};
  EXPECT_EQ(Submit(console_, {.path = Sample(), .watch = true}), kExitDone);
  ASSERT_THAT(JsonLines(out_.str()), SizeIs(1));
}

TEST_F(CommandsTest, ErrorsInJsonHaveCodeReasonAndFields) {
  console_.json = true;
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING, "demo-aaaaaa"),
                       JobIn(v1::JOB_STATE_RUNNING, "demo-bbbbbb")};
  EXPECT_EQ(Cancel(console_, "demo", std::nullopt), kExitWrongRequest);
  coordinator_.submit_answers = {InvalidFields(
      Reason::kSpecInvalid, {{"spec.name", "is too long"}, {"spec.data.path", "is\nempty"}})};
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitWrongRequest);
  EXPECT_EQ(Submit(console_, {.path = "/nonexistent.yaml"}), kExitWrongRequest);
  std::vector<nlohmann::json> errors;
  for (const auto& line : JsonLines(err_.str())) {
    if (line.contains("error")) errors.push_back(line.at("error"));
  }
  ASSERT_THAT(errors, SizeIs(3));
  EXPECT_EQ(errors[0].at("code"), "INVALID_ARGUMENT");
  EXPECT_EQ(errors[0].at("reason"), "JOB_AMBIGUOUS");
  EXPECT_EQ(errors[0].at("domain"), "upipe");
  EXPECT_EQ(errors[0].at("metadata").at("jobs"), "2");
  EXPECT_EQ(errors[1].at("reason"), "SPEC_INVALID");
  EXPECT_EQ(errors[1].at("field_violations").at(1).at("field"), "spec.data.path");
  EXPECT_EQ(errors[2].at("reason"), "JOB_FILE_UNREADABLE");
  EXPECT_EQ(out_.str(), "");
}

TEST_F(CommandsTest, WrongFieldsAreTextOneALine) {
  coordinator_.submit_answers = {InvalidFields(
      Reason::kSpecInvalid, {{"spec.name", "is too long"}, {"spec.data.path", "is\x1b[2J empty"}})};
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitWrongRequest);
  EXPECT_THAT(err_.str(),
              HasSubstr("\n  spec.name: is too long\n  spec.data.path: is [2J empty\n"));
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

TEST_F(CommandsTest, SubmitOptionsGoOverTheFile) {
  coordinator_.submit_answers = {JobIn(v1::JOB_STATE_QUEUED)};
  EXPECT_EQ(Submit(console_, {.path = Sample(),
                              .overrides = {"priority=1"},
                              .priority = -5,
                              .time_limit = absl::Hours(12),
                              .hold = true}),
            kExitDone);
  ASSERT_THAT(coordinator_.submitted, SizeIs(1));
  EXPECT_EQ(coordinator_.submitted[0].spec().priority(), -5);
  EXPECT_EQ(coordinator_.submitted[0].spec().time_limit_seconds(), 43'200);
  EXPECT_TRUE(coordinator_.submitted[0].hold());
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
  console_.json = true;
  EXPECT_EQ(Submit(console_, {.path = Sample()}), kExitDone);
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
  EXPECT_EQ(Hold(console_, "demo-b"), kExitDone);
  EXPECT_EQ(Hold(console_, "tiny-cccccc"), kExitDone);  // exact, though it begins another
  EXPECT_THAT(coordinator_.changes, ElementsAre("hold demo-bbbbbb", "hold tiny-cccccc"));
  EXPECT_EQ(Hold(console_, "demo"), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("'demo' begins the ids of 2 jobs: demo-aaaaaa, demo-bbbbbb"));
  EXPECT_EQ(Describe(console_, "nope"), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("no job's id is or begins with 'nope'"));
  EXPECT_THAT(coordinator_.changes, SizeIs(2));
}

// `upipe cancel "$JOB"` with the variable unset.
TEST_F(CommandsTest, AnEmptyIdIsNoBeginning) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING, "demo-aaaaaa")};
  EXPECT_EQ(Cancel(console_, "", std::nullopt), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("the job's id is empty"));
  EXPECT_THAT(coordinator_.cancelled, SizeIs(0));
}

TEST_F(CommandsTest, ListReadsEveryPage) {
  for (const char* id : {"a-aaaaaa", "b-bbbbbb", "c-cccccc", "d-dddddd", "e-eeeeee"}) {
    coordinator_.jobs.push_back(JobIn(v1::JOB_STATE_RUNNING, id));
  }
  console_.json = true;
  EXPECT_EQ(List(console_, {}), kExitDone);
  EXPECT_EQ(nlohmann::json::parse(out_.str()).at("jobs").size(), 5u);
}

TEST_F(CommandsTest, ListAsksForWhatItShows) {
  for (const char* id : {"a-aaaaaa", "b-bbbbbb", "c-cccccc", "d-dddddd", "e-eeeeee"}) {
    coordinator_.jobs.push_back(JobIn(v1::JOB_STATE_RUNNING, id));
  }
  console_.json = true;
  EXPECT_EQ(List(console_, {.states = {v1::JOB_STATE_RUNNING, v1::JOB_STATE_QUEUED},
                            .since = absl::FromUnixMillis(5),
                            .until = absl::FromUnixMillis(7),
                            .limit = 3}),
            kExitDone);
  EXPECT_EQ(nlohmann::json::parse(out_.str()).at("jobs").size(), 3u);
  ASSERT_THAT(coordinator_.listed, SizeIs(2));
  const v1::ListJobsRequest& request = coordinator_.listed[1];
  EXPECT_THAT(request.states(), ElementsAre(v1::JOB_STATE_RUNNING, v1::JOB_STATE_QUEUED));
  EXPECT_EQ(request.submitted_from_unix_millis(), 5);
  EXPECT_EQ(request.submitted_until_unix_millis(), 7);
  EXPECT_EQ(request.page_size(), 1);
  EXPECT_EQ(List(console_, {.name = "d"}), kExitDone);
  EXPECT_EQ(coordinator_.listed.back().id_prefix(), "d");
  EXPECT_FALSE(coordinator_.listed.back().has_submitted_from_unix_millis());
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
  coordinator_.watches = {{{}, RpcError(Reason::kJobNotFound, "no job demo-abcdef"), nullptr}};
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

FakeCoordinator::WatchScript Began() {
  return {{Says(JobIn(v1::JOB_STATE_STARTING))}, absl::OkStatus(), nullptr};
}
FakeCoordinator::WatchScript Ended() {
  return {{Says(JobIn(v1::JOB_STATE_RUNNING)), Says(JobIn(v1::JOB_STATE_SUCCEEDED))},
          absl::OkStatus(),
          nullptr};
}

TEST_F(CommandsTest, FollowedLogsWaitForTheJobToStart) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_QUEUED)};
  v1::Job queued = JobIn(v1::JOB_STATE_QUEUED);
  queued.set_reason("needs 4 slots, 2 are free");
  coordinator_.watches = {{{Says(queued), Says(queued), Says(JobIn(v1::JOB_STATE_STARTING))},
                           absl::OkStatus(),
                           nullptr},
                          Ended()};
  coordinator_.logs = {{{}, RpcError(Reason::kLogNotFound, "no log of that rank")},
                       {{Chunk(0, "one\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .follow = true}), kExitDone);
  EXPECT_EQ(out_.str(), "one\n");
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("is QUEUED"), HasSubstr("needs 4 slots, 2 are free"),
                                testing::EndsWith("upipe: demo-abcdef SUCCEEDED after 5.0 s\n")));
  EXPECT_THAT(pauses_, SizeIs(1));
}

TEST_F(CommandsTest, LogsOfAWorkerThatIsAwayFailAtOnce) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  for (const Reason reason : {Reason::kWorkerDisconnected, Reason::kWorkerLost}) {
    coordinator_.logs = {{{}, RpcError(reason, "worker b keeps this log and is away")}};
    EXPECT_EQ(Logs(console_, {.job = "demo"}), kExitFailed);
  }
  EXPECT_THAT(pauses_, IsEmpty());
  EXPECT_THAT(err_.str(), HasSubstr("upipe: worker b keeps this log and is away\n"));
}

TEST_F(CommandsTest, ALogBeingReadOutlivesItsWorkersRestartButNotItsLoss) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.logs = {{{Chunk(0, "one\n")}, RpcError(Reason::kLogBrokenOff, "broke off")},
                       {{}, RpcError(Reason::kWorkerDisconnected, "away")},
                       {{Chunk(4, "two\n")}, RpcError(Reason::kLogBrokenOff, "broke off")},
                       {{}, RpcError(Reason::kWorkerLost, "worker b is lost")}};
  EXPECT_EQ(Logs(console_, {.job = "demo"}), kExitFailed);
  EXPECT_EQ(out_.str(), "one\ntwo\n");
  EXPECT_THAT(err_.str(), HasSubstr("worker b is lost"));
  EXPECT_THAT(pauses_, SizeIs(3));
}

TEST_F(CommandsTest, LogsResumeWhereTheConnectionBroke) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.watches = {Began(), Ended()};
  coordinator_.logs = {
      {{Chunk(0, "one\n"), Chunk(4, "tw")}, absl::UnavailableError("gone")},
      {{Chunk(6, "o\n"), Chunk(20, "three\n", "bytes 8 to 20 are missing")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .rank = 1, .follow = true}), kExitDone);
  EXPECT_EQ(out_.str(), "one\ntwo\nthree\n");
  EXPECT_EQ(err_.str(), "[bytes 8 to 20 are missing]\nupipe: demo-abcdef SUCCEEDED after 5.0 s\n");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 6);
  EXPECT_EQ(coordinator_.log_requests[1].rank(), 1);
  EXPECT_TRUE(coordinator_.log_requests[1].follow());
}

TEST_F(CommandsTest, FollowedLogsGoOnThroughARestart) {
  v1::Job first = JobIn(v1::JOB_STATE_RUNNING), again = first,
          done = JobIn(v1::JOB_STATE_SUCCEEDED);
  first.set_generation(1);
  again.set_generation(2);
  done.set_generation(2);
  v1::Job waits = JobIn(v1::JOB_STATE_QUEUED);
  waits.set_generation(1);
  coordinator_.jobs = {first};
  coordinator_.watches = {{{Says(first)}, absl::OkStatus(), nullptr},
                          {{Says(waits), Says(again)}, absl::OkStatus(), nullptr},
                          {{Says(done)}, absl::OkStatus(), nullptr}};
  coordinator_.logs = {{{Chunk(0, "one\n")}, absl::OkStatus()},
                       {{Chunk(0, "two\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .follow = true}), kExitDone);
  EXPECT_EQ(out_.str(), "one\ntwo\n");
  EXPECT_EQ(err_.str(),
            "upipe: demo-abcdef was started again: generation 2\n"
            "upipe: demo-abcdef SUCCEEDED after 5.0 s\n");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[0].generation(), 1);
  EXPECT_EQ(coordinator_.log_requests[1].generation(), 2);
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 0);
}

TEST_F(CommandsTest, LogsOfAnEarlierAttempt) {
  v1::Job job = JobIn(v1::JOB_STATE_RUNNING);
  job.set_generation(3);
  coordinator_.jobs = {job};
  coordinator_.watches = {{{Says(job)}, absl::OkStatus(), nullptr}};
  coordinator_.logs = {{{Chunk(0, "one\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .generation = 2}), kExitDone);
  EXPECT_EQ(Logs(console_, {.job = "demo", .generation = 2, .follow = true}), kExitDone);
  EXPECT_EQ(out_.str(), "one\none\n");
  EXPECT_EQ(err_.str(), "");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[0].generation(), 2);
  EXPECT_EQ(coordinator_.log_requests[1].generation(), 2);
}

TEST_F(CommandsTest, LogsTailPrintsTheLastLinesThenFollows) {
  coordinator_.jobs = {JobIn(v1::JOB_STATE_RUNNING)};
  coordinator_.watches = {Began(), Ended()};
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
  coordinator_.watches = {Began(), Ended()};
  coordinator_.logs = {{{Chunk(-512, "")}, absl::OkStatus()},
                       {{Chunk(0, ""), Chunk(0, "first\n")}, absl::OkStatus()}};
  EXPECT_EQ(Logs(console_, {.job = "demo", .follow = true, .tail = 1}), kExitDone);
  EXPECT_EQ(out_.str(), "first\n");
  ASSERT_THAT(coordinator_.log_requests, SizeIs(2));
  EXPECT_EQ(coordinator_.log_requests[1].offset(), 0);
}

}  // namespace
}  // namespace upipe::client
