// `upipe report` and `upipe trace`: which files they ask for, what they make of what comes and of
// what does not.
#include "client/job_page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "client/job_files.h"
#include "client/job_trace.h"
#include "common/metrics/step_line.h"
#include "common/metrics/timeline_line.h"
#include "tests/support/report/sample_record.h"
#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

using FileKey = std::tuple<v1::RankFile, int, int64_t>;  // kind, rank, generation

// Serves files as workers do, in pieces of a few bytes.
class FilesCoordinator : public FakeCoordinator {
 public:
  absl::Status Logs(const v1::LogsRequest& request, const OnLogs& on_message) override {
    log_requests.push_back(request);
    const FileKey key(request.file(), request.rank(), request.generation());
    if (const auto failure = failures.find(key); failure != failures.end()) return failure->second;
    const auto file = files.find(key);
    if (file == files.end()) return RpcError(Reason::kLogNotFound, "this worker holds none");
    const std::string& text = file->second;
    const auto size = static_cast<int64_t>(text.size());
    int64_t at = request.offset() < 0 ? std::max<int64_t>(0, size + request.offset())
                                      : std::min(request.offset(), size);
    while (at < size) {
      v1::LogsResponse piece;
      piece.set_offset(at);
      piece.set_data(text.substr(static_cast<size_t>(at), piece_bytes));
      at += static_cast<int64_t>(piece.data().size());
      on_message(piece);
      if (cut_after > 0 && at >= cut_after) {
        cut_after = 0;
        return RpcError(Reason::kLogBrokenOff, "the worker's log stream broke off");
      }
    }
    return absl::OkStatus();
  }

  std::map<FileKey, std::string> files;
  std::map<FileKey, absl::Status> failures;
  size_t piece_bytes = 7;
  int64_t cut_after = 0;  // bytes, once
};

std::string Steps(int rank, int first, int last, double loss) {
  std::string text;
  for (int step = first; step <= last; ++step) {
    v1::StepReport report;
    report.set_step(step);
    report.set_total_steps(20);
    report.set_loss(loss);
    report.set_step_seconds(1);
    report.set_tokens_per_second(1000);
    report.mutable_memory()->set_peak_bytes(5000 + rank);
    v1::TagBytes& tag = *report.mutable_memory()->add_tags();
    tag.set_tag("weights");
    tag.set_peak_bytes(5000 + rank);
    tag.set_at_peak_bytes(5000 + rank);
    absl::StrAppend(&text, FormatStepLine({rank, 0, report}), "\n");
  }
  return text;
}

class JobPageTest : public ConsoleTest {
 protected:
  JobPageTest() {
    files_.jobs = {upipe::testing::SampleRecord({.ranks = 2, .steps = 20}).job};
    files_.files[{v1::RANK_FILE_JOB_STEPS, 0, 0}] = Steps(0, 1, 20, 2.5);
    files_.files[{v1::RANK_FILE_STEPS, 1, 1}] = Steps(1, 1, 12, 2.5);
    files_.files[{v1::RANK_FILE_STEPS, 1, 2}] = Steps(1, 9, 20, 2.5);
    files_.files[{v1::RANK_FILE_TIMELINES, 1, 2}] =
        FormatTimelineLine(upipe::testing::SampleTimeline(1, 17, 2)) + "\n{\"rank\":1,\"st";
    path_ = folder_ + "/page.html";
  }
  int Report() { return JobReport(over_files_, {"demo", path_}); }

  FilesCoordinator files_;
  Console over_files_{files_, out_, err_, clock_, console_.pause, std::nullopt};
  std::string path_;
};

TEST_F(JobPageTest, ReadsEveryAttemptOfTheFullestRank) {
  EXPECT_EQ(Report(), kExitDone) << err_.str();
  const std::string page = ReadText(path_);
  EXPECT_THAT(page, AllOf(HasSubstr("20 of 20"), HasSubstr("Memory of rank 1"),
                          HasSubstr("Step 17 of rank 1"), Not(HasSubstr("Missing on this page"))));
  EXPECT_THAT(out_.str(), HasSubstr("page.html: demo-x3kqab"));
  EXPECT_EQ(err_.str(), "");
}

TEST_F(JobPageTest, AfterARestartTheJobIsWhereItIsNow) {
  v1::Job& job = files_.jobs[0];
  job.set_state(v1::JOB_STATE_RUNNING);
  job.mutable_last_report()->set_step(12);
  job.mutable_attempts(0)->set_last_step(20);
  EXPECT_EQ(Report(), kExitDone) << err_.str();
  EXPECT_THAT(ReadText(path_), AllOf(HasSubstr("12 of 20"), HasSubstr("was at 20 before")));
}

TEST_F(JobPageTest, OthersMayReadItAsTheUmaskSays) {
  const mode_t before = umask(027);
  EXPECT_EQ(Report(), kExitDone) << err_.str();
  umask(before);
  struct stat info;
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, mode_t{0640});
}

TEST_F(JobPageTest, AWorkerThatIsGoneIsNamedOnThePage) {
  for (const int generation : {1, 2}) {
    files_.failures[{v1::RANK_FILE_STEPS, 1, generation}] =
        RpcError(Reason::kWorkerLost, "worker w0 keeps this log and is lost");
  }
  files_.failures[{v1::RANK_FILE_TIMELINES, 1, 2}] =
      RpcError(Reason::kWorkerLost, "worker w0 keeps this log and is lost");
  EXPECT_EQ(Report(), kExitDone);
  const std::string page = ReadText(path_);
  EXPECT_THAT(page, AllOf(HasSubstr("Missing on this page: the steps of rank 1 in generation 2: "
                                    "worker w0 keeps this log and is lost"),
                          HasSubstr("the timelines of rank 1 in generation 2"),
                          HasSubstr("Memory of rank 0"), HasSubstr("20 of 20")));
  EXPECT_THAT(err_.str(), HasSubstr("not on the page: the steps of rank 1 in generation 1"));
  EXPECT_THAT(pauses_, IsEmpty());  // lost is lost
}

TEST_F(JobPageTest, WithoutTheCoordinatorsFileTheRanksOwnIsRead) {
  files_.files.erase({v1::RANK_FILE_JOB_STEPS, 0, 0});
  files_.files[{v1::RANK_FILE_STEPS, 0, 1}] = Steps(0, 1, 12, 2.5);
  files_.files[{v1::RANK_FILE_STEPS, 0, 2}] = Steps(0, 9, 20, 2.5);
  EXPECT_EQ(Report(), kExitDone);
  EXPECT_THAT(ReadText(path_), HasSubstr("20 of 20"));
  EXPECT_THAT(err_.str(), HasSubstr("the steps of the job"));
}

TEST_F(JobPageTest, AStreamThatBreaksOffIsReadOnFromThere) {
  files_.cut_after = 1000;
  EXPECT_EQ(Report(), kExitDone);
  EXPECT_THAT(ReadText(path_), AllOf(HasSubstr("20 of 20"), Not(HasSubstr("Missing"))));
}

TEST_F(JobPageTest, LinesThatAreNoneAreCounted) {
  files_.files[{v1::RANK_FILE_STEPS, 1, 2}] += "no json\n{}\n";
  EXPECT_EQ(Report(), kExitDone);
  EXPECT_THAT(ReadText(path_), HasSubstr("rank 1 in generation 2: 2 lines could not be read"));
}

TEST_F(JobPageTest, AJobThatNeverRanHasAPage) {
  files_.jobs = {upipe::testing::RefusedRecord().job};
  EXPECT_EQ(JobReport(over_files_, {"large", path_}), kExitDone);
  EXPECT_THAT(files_.log_requests, IsEmpty());
  EXPECT_THAT(ReadText(path_), HasSubstr("a rank needs 91.2 GiB"));
}

TEST_F(JobPageTest, WhatCannotBeWrittenIsSaid) {
  path_ = folder_ + "/nowhere/page.html";
  EXPECT_EQ(Report(), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("nowhere/page.html"));
}

TEST_F(JobPageTest, LinesFromTheEndBeginWithAWholeOne) {
  files_.files[{v1::RANK_FILE_STEPS, 0, 7}] = "first\nsecond\nthird\ncut";
  v1::LogsRequest request;
  request.set_file(v1::RANK_FILE_STEPS);
  request.set_generation(7);
  const auto read = [&](int64_t offset) {
    std::vector<std::string> lines;
    request.set_offset(offset);
    EXPECT_TRUE(ReadLines(over_files_, request, [&](absl::string_view line) {
                  lines.emplace_back(line);
                }).ok());
    return lines;
  };
  EXPECT_THAT(read(0), ElementsAre("first", "second", "third"));
  EXPECT_THAT(read(-12), ElementsAre("third"));
  EXPECT_THAT(read(-1000), ElementsAre("first", "second", "third"));
}

class JobTraceTest : public JobPageTest {
 protected:
  JobTraceTest() {
    files_.files.clear();
    for (const int rank : {0, 1}) {
      std::string& text = files_.files[{v1::RANK_FILE_TIMELINES, rank, 0}];
      for (const int step : {1, 8, 15}) {
        if (rank == 1 && step == 15) continue;
        text += FormatTimelineLine(upipe::testing::SampleTimeline(rank, step, 2)) + "\n";
      }
    }
    files_.piece_bytes = 10'000;
    path_ = folder_ + "/trace.json";
  }
  // The steps that are drawn, by process.
  std::map<int, std::string> Drawn() {
    std::map<int, std::string> steps;
    const auto trace = nlohmann::json::parse(ReadText(path_));
    for (const auto& event : trace.at("traceEvents")) {
      const std::string name = event.at("name");
      if (name.substr(0, 5) == "step ") steps[event.at("pid")] = name;
    }
    return steps;
  }
};

TEST_F(JobTraceTest, DrawsTheNewestStepThatMostRanksHave) {
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_}), kExitDone) << err_.str();
  EXPECT_EQ(Drawn(), (std::map<int, std::string>{{1, "step 8"}, {2, "step 8"}}));
  EXPECT_THAT(out_.str(), HasSubstr("trace.json: step 8 of 2 ranks"));
}

TEST_F(JobTraceTest, DrawsTheRankAndTheStepThatAreAskedFor) {
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_, 0}), kExitDone);
  EXPECT_EQ(Drawn(), (std::map<int, std::string>{{1, "step 15"}}));
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_, std::nullopt, 1}), kExitDone);
  EXPECT_EQ(Drawn(), (std::map<int, std::string>{{1, "step 1"}, {2, "step 1"}}));
}

TEST_F(JobTraceTest, AStepThatWasNotRecordedSaysWhichWere) {
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_, std::nullopt, 9}), kExitWrongRequest);
  EXPECT_THAT(err_.str(),
              HasSubstr("step 9 of job demo-x3kqab was not recorded; those that were: 1, "
                        "8, 15"));
}

TEST_F(JobTraceTest, ARankThatCannotBeReadIsNamed) {
  files_.failures[{v1::RANK_FILE_TIMELINES, 1, 0}] = RpcError(Reason::kWorkerLost, "w1 is lost");
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_}), kExitDone);
  EXPECT_THAT(err_.str(), HasSubstr("not in the trace: the timelines of rank 1: w1 is lost"));
  files_.failures[{v1::RANK_FILE_TIMELINES, 0, 0}] = RpcError(Reason::kWorkerLost, "w0 is lost");
  EXPECT_EQ(JobTrace(over_files_, {"demo", path_}), kExitFailed);  // no wrong request
  EXPECT_THAT(err_.str(), HasSubstr("w0 is lost"));
}

}  // namespace
}  // namespace upipe::client
