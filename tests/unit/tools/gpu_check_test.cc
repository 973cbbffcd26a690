// The frame of the GPU check: what parts tell survives their death, time limits hold, a failure
// stops nothing, and the report says all of it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "absl/time/clock.h"
#include "tools/gpu_check/report.h"

namespace upipe::gpu_check {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class GpuCheck : public ::testing::Test {
 protected:
  GpuCheck() : log_(open("/dev/null", O_WRONLY | O_CLOEXEC)) {}
  ~GpuCheck() override { close(log_); }

  static Part MakePart(const std::string& name, std::function<absl::Status(Findings&)> run,
                       absl::Duration budget = absl::Seconds(20)) {
    return {.name = name,
            .what = "made up",
            .budget = budget,
            .cases = {"one case"},
            .run = std::move(run)};
  }

  const int log_;
};

TEST_F(GpuCheck, APartTellsAllItFinds) {
  const PartResult result = RunPart(MakePart("all",
                                             [](Findings& findings) {
                                               findings.Note("gpu", "NVIDIA \"H200\"\n");
                                               findings.Add({"forward", 700.5, "TFLOP/s", 650.0});
                                               findings.Add({"off", 0.5, "", 0.25, true});
                                               findings.Add({"lost", NAN, "s", {}});
                                               findings.Expect(true, "held", "never read");
                                               findings.Skipped("cuDNN: not here");
                                               return absl::OkStatus();
                                             }),
                                    absl::Seconds(20), log_);
  EXPECT_EQ(result.outcome, Outcome::kPassed);
  EXPECT_EQ(result.found.passed, 1);
  EXPECT_THAT(result.found.failures, IsEmpty());
  EXPECT_THAT(result.found.skipped, ElementsAre("cuDNN: not here"));
  EXPECT_THAT(result.found.notes, ElementsAre(std::pair("gpu", "NVIDIA \"H200\"\n")));
  ASSERT_EQ(result.found.numbers.size(), 3u);
  EXPECT_EQ(result.found.numbers[0].value, 700.5);
  EXPECT_TRUE(result.found.numbers[0].Meets());
  EXPECT_FALSE(result.found.numbers[1].Meets());
  EXPECT_TRUE(std::isnan(result.found.numbers[2].value));
}

TEST_F(GpuCheck, WhatWasFoundBeforeACrashIsKept) {
  const PartResult result = RunPart(MakePart("crash",
                                             [](Findings& findings) -> absl::Status {
                                               findings.Passed("first");
                                               raise(SIGABRT);
                                               return absl::OkStatus();
                                             }),
                                    absl::Seconds(20), log_);
  EXPECT_EQ(result.outcome, Outcome::kFailed);
  EXPECT_EQ(result.found.passed, 1);
  EXPECT_THAT(result.found.failures, ElementsAre(HasSubstr("died of signal 6")));
}

TEST_F(GpuCheck, APartIsStoppedAtItsLimit) {
  const absl::Time begin = absl::Now();
  const PartResult result = RunPart(MakePart("hang",
                                             [](Findings& findings) -> absl::Status {
                                               findings.Passed("first");
                                               pause();
                                               return absl::OkStatus();
                                             }),
                                    absl::Milliseconds(200), log_);
  EXPECT_EQ(result.outcome, Outcome::kStopped);
  EXPECT_EQ(result.found.passed, 1);
  EXPECT_THAT(result.found.failures, ElementsAre(HasSubstr("stopped after 200ms")));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST_F(GpuCheck, AFailureStopsNothingAndNoTimeIsSaid) {
  const auto fails = [](Findings&) { return absl::InternalError("an illegal address"); };
  const auto passes = [](Findings& findings) {
    findings.Passed("it");
    return absl::OkStatus();
  };
  const auto skips = [](Findings& findings) {
    findings.Skipped("no GPU");
    return absl::OkStatus();
  };
  const auto hangs = [](Findings&) -> absl::Status {
    pause();
    return absl::OkStatus();
  };
  std::vector<std::string> heard;
  const std::vector<PartResult> results = RunParts(
      {MakePart("fails", fails), MakePart("passes", passes), MakePart("skips", skips),
       MakePart("hangs", hangs), MakePart("late", passes)},
      absl::Seconds(3), log_, [&](const PartResult& result) { heard.push_back(result.name); });
  EXPECT_THAT(heard, ElementsAre("fails", "passes", "skips", "hangs", "late"));
  EXPECT_EQ(results[0].outcome, Outcome::kFailed);
  EXPECT_THAT(results[0].found.failures, ElementsAre("an illegal address"));
  EXPECT_EQ(results[1].outcome, Outcome::kPassed);
  EXPECT_EQ(results[2].outcome, Outcome::kSkipped);
  EXPECT_EQ(results[3].outcome, Outcome::kStopped);
  EXPECT_EQ(results[4].outcome, Outcome::kSkipped);
  EXPECT_THAT(results[4].found.skipped, ElementsAre("no time was left for it"));
  EXPECT_FALSE(AllWell(results));
  EXPECT_EQ(Summary(results),
            "1 of 5 parts passed; failed: fails; stopped at their time limit: hangs; skipped: "
            "skips, late\n");
}

TEST_F(GpuCheck, APartHasWhatEarlierOnesLeft) {
  const auto passes = [](Findings& findings) {
    findings.Passed("");
    return absl::OkStatus();
  };
  const auto ignore = [](const PartResult&) {};
  const std::vector<PartResult> results = RunParts({MakePart("first", passes, absl::Seconds(100)),
                                                    MakePart("second", passes, absl::Seconds(200)),
                                                    MakePart("third", passes, absl::Seconds(300))},
                                                   absl::Seconds(620), log_, ignore);
  const auto expect_about = [](const PartResult& result, int seconds) {
    EXPECT_LE(result.limit, absl::Seconds(seconds)) << result.name;
    EXPECT_GT(result.limit, absl::Seconds(seconds - 60)) << result.name;
  };
  expect_about(results[0], 120);
  expect_about(results[1], 320);
  expect_about(results[2], 620);
}

TEST_F(GpuCheck, WhatCannotRunHereIsSkippedAndNothingIsNotWell) {
  const auto no_gpu = [](Findings&) { return absl::FailedPreconditionError("no GPU"); };
  const auto no_memory = [](Findings&) { return absl::ResourceExhaustedError("80 GiB"); };
  const auto ignore = [](const PartResult&) {};
  std::vector<PartResult> results = RunParts(
      {MakePart("gpu", no_gpu), MakePart("memory", no_memory)}, absl::Seconds(20), log_, ignore);
  EXPECT_EQ(results[0].outcome, Outcome::kSkipped);
  EXPECT_THAT(results[1].found.skipped, ElementsAre("80 GiB"));
  EXPECT_FALSE(AllWell(results)) << "nothing was checked";
  results.push_back({.name = "one", .what = "checked"});
  results.back().found.passed = 1;
  EXPECT_TRUE(AllWell(results));
}

TEST_F(GpuCheck, ACutLineIsLeftOut) {
  const FindingsRead read = ReadFindings("{\"passed\": \"a\"}\n\n{\"failed\": \"b");
  EXPECT_EQ(read.passed, 1);
  EXPECT_THAT(read.failures, IsEmpty());
}

std::vector<PartResult> MadeUp() {
  PartResult machine = {.name = "machine", .what = "the machine"};
  machine.found.notes = {{"gpu", "NVIDIA H200"}, {"cudnn", "9.19.0"}};
  PartResult rates = {.name = "rates", .what = "how fast", .limit = absl::Seconds(60)};
  rates.taken = absl::Milliseconds(12345);
  rates.found.numbers = {{"cuDNN forward, 32K tokens, 1 head", 687.96, "TFLOP/s", 650.0},
                         {"cuDNN backward, 32K tokens, 1 head", 512.34, "TFLOP/s", 550.0},
                         {"planned and measured apart", 0.0123, "of measured", 0.03, true}};
  rates.found.passed = 7;
  rates.found.failures = {"the gradient is off"};
  rates.outcome = Outcome::kFailed;
  return {machine, rates};
}

TEST_F(GpuCheck, JsonHasTheFormOfTheResults) {
  const ReportHead head = {
      .commit = "abc1234", .command = "upipe-gpu-check", .date = absl::FromUnixSeconds(1)};
  const nlohmann::ordered_json json = ToJson(head, MadeUp());
  EXPECT_EQ(json["commit"], "abc1234");
  EXPECT_EQ(json["date"], "1970-01-01T00:00:01Z");
  EXPECT_EQ(json["machine"]["cudnn"], "9.19.0");
  EXPECT_EQ(json["all_well"], false);
  const nlohmann::ordered_json& part = json["parts"][1];
  EXPECT_EQ(part["outcome"], "failed");
  EXPECT_EQ(part["seconds"], 12.35);
  EXPECT_EQ(part["checks_passed"], 7);
  EXPECT_EQ(part["numbers"][0]["value"], 687.96);
  EXPECT_EQ(part["numbers"][0]["aim_at_least"], 650);
  EXPECT_EQ(part["numbers"][1]["aim_met"], false);
  EXPECT_EQ(part["numbers"][2]["aim_at_most"], 0.03);
  EXPECT_EQ(part["numbers"][2]["aim_met"], true);
  EXPECT_EQ(part["failures"][0], "the gradient is off");
}

TEST_F(GpuCheck, TheTableHasAimsAndFailures) {
  const std::string text = ToText(MadeUp()[1]);
  EXPECT_THAT(text, HasSubstr("rates            FAILED     12.3 s of  60, 7 checks   how fast\n"));
  EXPECT_THAT(text, HasSubstr("688 TFLOP/s  (aim: 650)\n"));
  EXPECT_THAT(text, HasSubstr("512 TFLOP/s  (aim: 550, missed)\n"));
  EXPECT_THAT(text, HasSubstr("0.0123 of measured  (aim: at most 0.03)\n"));
  EXPECT_THAT(text, HasSubstr("    FAILED: the gradient is off\n"));
  EXPECT_THAT(Summary(MadeUp()), HasSubstr("1 numbers miss their aim"));
}

TEST_F(GpuCheck, TheListingHasSizesAndLimits) {
  const std::string text =
      Listing({MakePart("one", nullptr), MakePart("two", nullptr)}, absl::Seconds(30));
  EXPECT_EQ(text,
            "one                 20 s   made up\n    one case\n"
            "two                 20 s   made up\n    one case\n"
            "2 parts, 40 s of at most 30 s\n");
}

}  // namespace
}  // namespace upipe::gpu_check
