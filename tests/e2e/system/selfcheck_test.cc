// `upipe selfcheck` and train.selfcheck with the built binaries: one verdict in the command's
// output and exit code, in the trainers' logs and, where it is FAIL, as the cause of a job that is
// not tried again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;

// Weights of 1e30: the gradients that come of them are no numbers, whoever computes them.
constexpr char kHopeless[] = "optimizer: {learning_rate: 1e30}\n";

class SelfCheckTest : public ::testing::Test {
 protected:
  SelfCheckTest() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-selfcheck-", getpid())) {}

  std::string Submit(const std::string& file) {
    const CommandResult result =
        cluster_.Upipe({"submit", file, "--set", "train.selfcheck=true", "-o", "json"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const json answer = json::parse(result.output, nullptr, /*allow_exceptions=*/false);
    return answer.is_object() ? answer.value("id", "") : "";
  }

  Cluster cluster_;
};

TEST_F(SelfCheckTest, TheCommandEndsInOneVerdict) {
  const std::string file = cluster_.JobFile("good", 4, 3);
  const CommandResult passes = cluster_.Upipe({"selfcheck", file});
  EXPECT_EQ(passes.exit_code, 0) << passes.errors;
  EXPECT_THAT(passes.output,
              AllOf(HasSubstr("\nPASS: 3 steps of 256 tokens at CP = 4 and at CP = 1 agree"),
                    HasSubstr("CP = 4, device: arena"), HasSubstr("probe      other tokens")));

  const CommandResult fails =
      cluster_.Upipe({"selfcheck", cluster_.JobFile("hopeless", 4, 3, kHopeless), "-o", "json",
                      "--steps", "2", "--context", "128"});
  EXPECT_EQ(fails.exit_code, 1) << fails.errors;
  const json report = json::parse(fails.output, nullptr, /*allow_exceptions=*/false);
  ASSERT_TRUE(report.is_object()) << fails.output;
  EXPECT_EQ(report["passed"], false);
  EXPECT_THAT(report["verdict"].get<std::string>(),
              HasSubstr("FAIL: gradient norm of step 2 is not finite: "));
  EXPECT_EQ(report["shape"]["context"], 128);
  EXPECT_EQ(report["gradients"].size(), 21u);
  EXPECT_EQ(report["memory"][0]["planned"], report["memory"][0]["measured"]);

  const CommandResult refused = cluster_.Upipe({"selfcheck", file, "--context", "1K"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_THAT(refused.errors, HasSubstr("1024 tokens; 1 to the job's context of 256"));
  EXPECT_EQ(cluster_.Upipe({"selfcheck", file, "--set", "parallel.ranks=3"}).exit_code, 2);
}

TEST_F(SelfCheckTest, AJobChecksItselfBeforeItsFirstStep) {
  cluster_.StartCoordinator();
  cluster_.StartWorker("w0", 2);
  cluster_.StartWorker("w1", 2);
  const std::string good = Submit(cluster_.JobFile("good", 4, 3));
  const std::string hopeless = Submit(cluster_.JobFile("hopeless", 4, 3, kHopeless));

  EXPECT_EQ(cluster_.Upipe({"wait", good}).exit_code, 0);
  for (const char* rank : {"0", "3"}) {
    EXPECT_THAT(cluster_.Upipe({"logs", good, "--rank", rank}).output,
                HasSubstr("self check: PASS: 3 steps of "));
  }
  // The device that trained is not the one that was checked.
  const json described = cluster_.Describe(good);
  EXPECT_EQ(described["last_report"]["memory"]["arena_bytes"],
            described["plan"]["ranks"][0]["memory"]["arena_bytes"]);

  EXPECT_NE(cluster_.Upipe({"wait", hopeless}).exit_code, 0);
  const json failed = cluster_.Describe(hopeless);
  EXPECT_EQ(failed.value("shown_state", ""), "FAILED");
  EXPECT_EQ(failed["cause"].value("kind", ""), "CAUSE_KIND_SELFCHECK");
  EXPECT_THAT(failed["cause"].value("message", ""),
              HasSubstr("self check: FAIL: gradient norm of step 2 is not finite"));
  EXPECT_EQ(failed["attempts"].size(), 1u);
}

}  // namespace
}  // namespace upipe
