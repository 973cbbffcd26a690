// `upipe plan` as people call it: with a job file and without, every question it answers, pictures
// and traces, and bad input in one sentence each with its exit code.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using testing::CommandResult;
using ::testing::HasSubstr;
using ::testing::Not;

class PlanVerb : public ::testing::Test {
 protected:
  PlanVerb() : folder_(absl::StrCat(::testing::TempDir(), "upipe-plan-", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~PlanVerb() override { std::filesystem::remove_all(folder_); }

  static CommandResult Plan(std::vector<std::string> arguments) {
    const std::string bin = std::getenv("UPIPE_BIN_DIR");
    arguments.insert(arguments.begin(), {absl::StrCat(bin, "/upipe"), "plan"});
    return testing::RunCommand(arguments, absl::Seconds(100));
  }
  static json PlanJson(std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"-o", "json"});
    const CommandResult result = Plan(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return json::parse(result.output, nullptr, /*allow_exceptions=*/false);
  }
  std::string JobFile(const std::string& extra = "") const {
    const std::string path = folder_ + "/job.yaml";
    std::ofstream(path) << "name: job\nmodel: {preset: tiny}\ndata: {path: none}\n"
                           "parallel: {ranks: 4, method: upipe, heads_per_stage: 4}\n"
                           "train: {context: 8K, steps: 3}\n"
                        << extra;
    return path;
  }
  static std::string TextOf(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // One sentence on one line, and nothing on stdout.
  static void ExpectRefused(const std::vector<std::string>& arguments, int code,
                            const std::vector<std::string>& words) {
    const CommandResult result = Plan(arguments);
    EXPECT_EQ(result.exit_code, code) << result.errors;
    EXPECT_EQ(result.output, "");
    EXPECT_EQ(std::count(result.errors.begin(), result.errors.end(), '\n'), 1) << result.errors;
    for (const std::string& word : words) EXPECT_THAT(result.errors, HasSubstr(word));
  }

  const std::string folder_;
};

TEST_F(PlanVerb, AJobFileIsPlannedAndExplained) {
  const CommandResult plan = Plan({JobFile(), "--without-data", "--explain"});
  EXPECT_EQ(plan.exit_code, 0) << plan.errors;
  EXPECT_THAT(plan.output,
              AllOf(HasSubstr("method     upipe, 4 ranks"), HasSubstr("attn_kv"),
                    HasSubstr(" a step on cpu, "), HasSubstr("attention backward"),
                    HasSubstr("kernel: cpu own fp32"), HasSubstr("query_chunks           1"),
                    HasSubstr("measured: upipe calibrate"), Not(HasSubstr("looked at"))));
  EXPECT_EQ(Plan({JobFile()}).exit_code, 2) << "its data is not there";
}

TEST_F(PlanVerb, WithoutAJobTheModelIsPlannedOnDevicesNobodyHas) {
  const json plan = PlanJson({"--model", "medium", "--gpus", "8", "--context", "64K"});
  EXPECT_EQ(plan["device"], "h100-80gb");
  EXPECT_EQ(plan["spec"]["parallel"]["backend"], "cuda");
  EXPECT_NE(plan["spec"]["parallel"]["method"], "METHOD_AUTO");
  EXPECT_GT(plan["candidates"].size(), 5u);
  EXPECT_GT(plan["step_time"]["causal_mfu"].get<double>(), 0);
  const json pinned = PlanJson({"--model", "medium", "--gpus", "8", "--context", "64K", "--method",
                                "ulysses", "--device", "h200"});
  EXPECT_EQ(pinned["spec"]["parallel"]["method"], "METHOD_ULYSSES");
  EXPECT_EQ(pinned["device"], "h200");
}

TEST_F(PlanVerb, TheLongestContextFitsAndTwiceAsMuchDoesNot) {
  const std::vector<std::string> setup = {"--model",         "tiny",    "--gpus",        "4",
                                          "--method",        "upipe",   "--ring-ranks",  "1",
                                          "--device-memory", "4400MiB", "--host-memory", "256MiB"};
  std::vector<std::string> asked = setup;
  asked.push_back("--max-context");
  const json plan = PlanJson(asked);
  const int64_t longest = std::stoll(plan["spec"]["train"]["context"].get<std::string>());
  EXPECT_GT(longest, 4096);
  std::vector<std::string> more = setup;
  more.insert(more.end(), {"--context", absl::StrCat(2 * longest)});
  const CommandResult refused = Plan(more);
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.errors, AllOf(HasSubstr("nothing fits"), HasSubstr("would fit")));
}

TEST_F(PlanVerb, TheFewestDevicesFitAndFewerDoNot) {
  const std::vector<std::string> setup = {"--model",         "tiny",    "--context",     "1M",
                                          "--device-memory", "4700MiB", "--host-memory", "512MiB"};
  std::vector<std::string> asked = setup;
  asked.push_back("--min-gpus");
  const json plan = PlanJson(asked);
  const int ranks = plan["spec"]["parallel"]["ranks"];
  EXPECT_GT(ranks, 1);
  EXPECT_EQ(plan["spec"]["parallel"]["ranks_per_node"], std::min(ranks, 8)) << "a node of the H100";
  std::vector<std::string> fewer = setup;
  fewer.insert(fewer.end(), {"--gpus", absl::StrCat(ranks / 2)});
  EXPECT_EQ(Plan(fewer).exit_code, 1);
}

TEST_F(PlanVerb, ASweepIsATableACurveAndJson) {
  const std::vector<std::string> sweep = {"--model", "tiny",
                                          "--gpus",  "2",
                                          "--sweep", "context=4K..32K",
                                          "--plot",  folder_ + "/sweep.svg"};
  const CommandResult table = Plan(sweep);
  EXPECT_EQ(table.exit_code, 0) << table.errors;
  for (const char* context : {"4K", "8K", "16K", "32K"}) {
    EXPECT_THAT(table.output, HasSubstr(absl::StrCat(" ", context, " ")));
  }
  EXPECT_THAT(TextOf(folder_ + "/sweep.svg"), AllOf(HasSubstr("<svg"), HasSubstr("</svg>")));
  const json plans = PlanJson(sweep);
  ASSERT_EQ(plans.size(), 4u);
  EXPECT_TRUE(plans[3].contains("plan"));
}

TEST_F(PlanVerb, PicturesAndTracesAreWritten) {
  const CommandResult result =
      Plan({JobFile(), "--without-data", "--plot", folder_ + "/plan.svg", "--trace",
            folder_ + "/plan.json", "--memory-per-rank", "1GiB"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(TextOf(folder_ + "/plan.svg"), AllOf(HasSubstr("<svg"), HasSubstr("1.0 GiB")));
  const json trace = json::parse(TextOf(folder_ + "/plan.json"), nullptr, false);
  EXPECT_TRUE(trace.is_object() || trace.is_array());
  const CommandResult nowhere =
      Plan({JobFile(), "--without-data", "--plot", folder_ + "/no/such/plan.svg"});
  EXPECT_EQ(nowhere.exit_code, 1);
  EXPECT_THAT(nowhere.errors, HasSubstr("cannot write"));
}

TEST_F(PlanVerb, TheReleasedCodeIsShownBesideIt) {
  const CommandResult upipe =
      Plan({"--model", "llama3-8b", "--gpus", "8", "--context", "5M", "--released", "upipe"});
  EXPECT_EQ(upipe.exit_code, 0) << upipe.errors;
  EXPECT_THAT(upipe.output, HasSubstr("fits"));
}

TEST_F(PlanVerb, BadInputIsOneSentence) {
  ExpectRefused({"--model", "lama3-8b", "--gpus", "8", "--context", "1M"}, 2,
                {"lama3-8b", "did you mean", "llama3-8b"});
  ExpectRefused({"--model", "tiny", "--gpus", "8", "--context", "5Q"}, 2, {"5Q"});
  ExpectRefused({"--model", "tiny", "--gpus", "8", "--context", "8K", "--device-memory", "80Gb"}, 2,
                {"80Gb"});
  ExpectRefused({"--model", "tiny", "--gpus", "8", "--context", "8K", "--device", "h300"}, 2,
                {"h300", "h100-80gb"});
  ExpectRefused({"--model", "tiny", "--gpus", "8", "--context", "8K", "--device-memory", "1GiB"}, 2,
                {"1.0 GiB", "context, communicators"});
  ExpectRefused({"--model", "llama3-70b", "--gpus", "1", "--context", "1K", "--device-memory",
                 "8GiB", "--host-memory", "16GiB"},
                1, {"nothing fits", "no shorter context would fit either"});
  ExpectRefused({"--model", "tiny", "--gpus", "2", "--sweep", "context=8K..4K"}, 2,
                {"context=8K..4K"});
  ExpectRefused({"--model", "tiny", "--gpus", "2", "--sweep", "ranks=1..4"}, 2, {"ranks=1..4"});
  ExpectRefused({}, 2, {"name a job file or --model"});
  ExpectRefused({JobFile(), "--without-data", "--min-gpus"}, 2, {"needs --memory-per-rank"});
  EXPECT_EQ(Plan({"--model", "tiny", "--gpus", "0", "--context", "8K"}).exit_code, 2);
  EXPECT_EQ(Plan({"--model", "tiny", "--max-context", "--sweep", "context=1K..2K"}).exit_code, 2);
}

TEST_F(PlanVerb, AContextBeyondTheTrainedPositionsIsAWarning) {
  const json plan = PlanJson({"--model", "llama3-8b", "--gpus", "8", "--context", "32K"});
  bool warned = false;
  for (const auto& note : plan["notes"]) {
    warned |= note.get<std::string>().find("8,192 positions") != std::string::npos;
  }
  EXPECT_TRUE(warned);
}

}  // namespace
}  // namespace upipe
