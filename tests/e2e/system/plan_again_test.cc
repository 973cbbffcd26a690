// A library that takes more scratch than the plan counted, with the built binaries: the attempt
// ends before step 1, the job is planned once more with what was measured, and trains to the same
// bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

using nlohmann::json;
using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;

class PlanAgainTest : public ::testing::Test {
 protected:
  PlanAgainTest()
      : cluster_(absl::StrCat(::testing::TempDir(), "upipe-plan-again-", getpid())),
        failpoint_(absl::StrCat(cluster_.folder(), "/failpoint")) {
    setenv("UPIPE_FAILPOINT_FILE", failpoint_.c_str(), 1);
    cluster_.StartCoordinator();
    cluster_.StartWorker("w0", 1);
    cluster_.StartWorker("w1", 1);
  }
  ~PlanAgainTest() override { unsetenv("UPIPE_FAILPOINT_FILE"); }

  // The n-th scratch that is measured is made more than it is, in one of the trainers.
  void TakeMore(int n) {
    std::ofstream(failpoint_ + ".new") << "trainer.workspace:eio:" << n;
    std::filesystem::rename(failpoint_ + ".new", failpoint_);
  }
  json Train(const std::string& name, const std::string& more = "") {
    const std::string file = cluster_.JobFile(
        name, 2, 4, absl::StrCat("checkpoint: {path: ", cluster_.folder(), "/checkpoints}\n"));
    std::vector<std::string> words = {"submit", file, "-o", "json"};
    if (!more.empty()) words.insert(words.end(), {"--set", more});
    const CommandResult result = cluster_.Upipe(words);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const json answer = json::parse(result.output, nullptr, /*allow_exceptions=*/false);
    const std::string id = answer.is_object() ? answer.value("id", "") : "";
    cluster_.Upipe({"wait", id});
    return cluster_.Describe(id);
  }

  Cluster cluster_;
  const std::string failpoint_;
};

TEST_F(PlanAgainTest, TheJobTrainsToTheSameBits) {
  const json straight = Train("straight");
  ASSERT_EQ(straight.value("shown_state", ""), "SUCCEEDED") << straight;
  TakeMore(1);
  const json again = Train("again");
  ASSERT_EQ(again.value("shown_state", ""), "SUCCEEDED") << again;
  EXPECT_FALSE(std::filesystem::exists(failpoint_));
  EXPECT_EQ(again.value("generation", ""), "2");
  EXPECT_EQ(again["last_commit"]["content_sha256"], straight["last_commit"]["content_sha256"]);
  EXPECT_NE(again["plan"]["plan_hash"], straight["plan"]["plan_hash"]);
  EXPECT_THAT(again["attempts"][0]["cause"].value("message", ""),
              ::testing::AllOf(HasSubstr("bytes) of scratch here"), HasSubstr("are planned")));
  EXPECT_THAT(again["events"].dump(), HasSubstr("planned once more: "));
  // Nobody is charged for it, and what is measured is what was planned.
  EXPECT_EQ(again["restarts"].value("application", 0), 0) << again["restarts"];
  for (const char* bytes : {"arena_bytes", "peak_bytes"}) {
    EXPECT_EQ(again["last_report"]["memory"][bytes], again["plan"]["ranks"][0]["memory"][bytes]);
  }
  EXPECT_EQ(again["plan"]["measured"]["ops"].empty(), false);
  const CommandResult described = cluster_.Upipe({"describe", again.value("id", "")});
  EXPECT_THAT(described.output,
              HasSubstr("note: scratch is as a worker measured it: matmul takes"));
}

// What a second plan takes may be more than there is.
TEST_F(PlanAgainTest, ANewPlanThatDoesNotFitFailsTheJob) {
  TakeMore(1);
  const json failed = Train("tight", "train.memory_per_rank=1MiB");
  EXPECT_EQ(failed.value("shown_state", ""), "FAILED") << failed;
  EXPECT_EQ(failed["cause"].value("kind", ""), "CAUSE_KIND_PLAN_REFUSED");
  EXPECT_THAT(
      failed["cause"].value("message", ""),
      ::testing::AllOf(HasSubstr("planned once more with the scratch that a worker measured: "),
                       HasSubstr("may take 1.0 MiB")));
}

}  // namespace
}  // namespace upipe
