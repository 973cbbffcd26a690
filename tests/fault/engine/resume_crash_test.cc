// `upipe run` killed at every named point of a checkpoint, again and again, and started again each
// time: what it ends with is what it would have ended with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/failpoint.h"
#include "engine/data/shard_writer.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe {
namespace {

using ::testing::HasSubstr;

class ResumeCrashTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 1600; ++i) absl::StrAppend(&text, "line ", i * i, "\n");
    for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
      std::filesystem::create_directories(folder_.Path("corpus"));
      ASSERT_TRUE(data::WriteByteShard(folder_.Path(absl::StrCat("corpus/", name)), {text}).ok());
    }
    folder_.Write("job.yaml", absl::StrCat(R"(name: crash
model: {vocab_size: 257, hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 8,
        intermediate_size: 16}
data: {path: )",
                                           folder_.Path("corpus"), R"(}
parallel: {ranks: 2, method: upipe, heads_per_stage: 2}
train: {context: 32, steps: 9, eval_sequences: 0}
checkpoint: {path: )",
                                           folder_.Path("root"), R"(, every_steps: 2, keep: 2}
)"));
  }

  struct Ended {
    int status = 0;      // as wait says
    std::string output;  // stdout and stderr
  };
  static Ended Shell(const std::string& command) {
    FILE* pipe = popen(absl::StrCat("exec 2>&1; exec ", command).c_str(), "r");
    Ended ended;
    std::array<char, 4096> buffer;
    while (const size_t got = fread(buffer.data(), 1, buffer.size(), pipe)) {
      ended.output.append(buffer.data(), got);
    }
    ended.status = pclose(pipe);
    return ended;
  }
  Ended RunJob(const std::string& environment, const std::string& root) const {
    return Shell(
        absl::StrCat("env ", environment, " ", Bin("upipe-run"), " ", folder_.Path("job.yaml"),
                     " --quiet --no-cpu-placement --set checkpoint.path=", folder_.Path(root)));
  }
  static std::string Bin(const std::string& name) {
    return absl::StrCat(getenv("UPIPE_BIN_DIR"), "/", name);
  }
  // content_sha256 of the last step.
  std::string Content(const std::string& root) const {
    const Ended verify = Shell(absl::StrCat("sh -c '", Bin("upipe-verify"), " --quiet ",
                                            folder_.Path(root), "/crash/g*/s9'"));
    EXPECT_EQ(verify.status, 0) << verify.output;
    return std::string(absl::StripSuffix(verify.output, "\n"));
  }

  data::TempFolder folder_;
};

TEST_F(ResumeCrashTest, EndsWithTheSameBitsWhereverItWasKilled) {
  ASSERT_EQ(RunJob("A=1", "undisturbed").status, 0);
  const std::string expected = Content("undisturbed");
  ASSERT_EQ(expected.size(), 64u);
  int killed = 0;
  for (const absl::string_view point : failpoints::kAll) {
    if (!absl::StartsWith(point, "checkpoint.") && point != failpoints::kTrainerStep) continue;
    SCOPED_TRACE(point);
    const std::string root = absl::StrCat("root-", point);
    // Three generations die at different hits, where there are so many.
    for (const int hit : {5, 2, 1}) {
      const Ended ended = RunJob(absl::StrCat("UPIPE_FAILPOINT=", point, ":kill:", hit), root);
      const bool dead = WIFSIGNALED(ended.status) && WTERMSIG(ended.status) == SIGKILL;
      EXPECT_TRUE(dead || ended.status == 0) << ended.output;
      killed += dead ? 1 : 0;
    }
    const Ended last = RunJob("A=1", root);
    EXPECT_EQ(last.status, 0) << last.output;
    EXPECT_EQ(Content(root), expected);
  }
  EXPECT_GE(killed, 15);
}

TEST_F(ResumeCrashTest, VerifyTellsWholeDamagedAndNone) {
  ASSERT_EQ(RunJob("A=1", "root").status, 0);
  const std::string verify = absl::StrCat(Bin("upipe-verify"), " ", folder_.Path("root"));
  const Ended whole = Shell(verify);
  EXPECT_EQ(whole.status, 0);
  EXPECT_THAT(whole.output, HasSubstr("step 9"));
  EXPECT_THAT(whole.output, HasSubstr("content_sha256"));
  EXPECT_EQ(WEXITSTATUS(Shell(absl::StrCat(Bin("upipe-verify"), " ", folder_.Path("none"))).status),
            2);
  EXPECT_EQ(
      WEXITSTATUS(Shell(absl::StrCat(Bin("upipe-verify"), " ", folder_.Path("corpus"))).status), 3);
  std::string bytes = folder_.Read("root/crash/g1/s9/rank-1.shard");
  bytes[500] ^= 4;
  folder_.Write("root/crash/g1/s9/rank-1.shard", bytes);
  const Ended damaged = Shell(verify);
  EXPECT_EQ(WEXITSTATUS(damaged.status), 1);
  EXPECT_THAT(damaged.output, HasSubstr("damaged     "));
  // The one before is gone on from, and says so.
  const Ended again = RunJob("A=1", "root");
  EXPECT_EQ(again.status, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr("checkpoint of step 9: passed over"));
}

TEST_F(ResumeCrashTest, AnotherJobsCheckpointsAreLeftAlone) {
  ASSERT_EQ(RunJob("A=1", "root").status, 0);
  const Ended other = RunJob("A=1", "root --set train.seed=2");
  EXPECT_NE(other.status, 0);
  EXPECT_THAT(other.output, HasSubstr("train.seed is 1, the job's 2"));
  EXPECT_THAT(other.output, HasSubstr("use another name or checkpoint.path"));
  EXPECT_TRUE(std::filesystem::exists(folder_.Path("root/crash/g1/s9/MANIFEST")));
}

}  // namespace
}  // namespace upipe
