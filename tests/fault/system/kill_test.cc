// kill -9 of a trainer, a worker and the coordinator under a running job: the job ends or goes on
// as CONTROL-PLANE says, every death is explained, and no process, shared memory or slot is left
// behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;
using testing::TrainersOf;

constexpr int kForever = 1000000;
constexpr char kNoRestarts[] = "restarts: {infrastructure: 0}\n";

class KillTest : public ::testing::Test {
 protected:
  KillTest() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-kill-", getpid())) {}

  void Start(double autonomy_seconds = 3) {
    cluster_.StartCoordinator(autonomy_seconds);
    cluster_.StartWorker("w0", 2);
    cluster_.StartWorker("w1", 2);
  }
  std::string RunningJob(int steps = kForever, const std::string& extra = "") {
    const CommandResult result =
        cluster_.Upipe({"submit", cluster_.JobFile("job", 4, steps, extra), "-o", "json"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const std::string job = nlohmann::json::parse(result.output).value("id", "");
    cluster_.AwaitStep(job, absl::Seconds(60));
    EXPECT_EQ(TrainersOf(job).size(), 4u);
    return job;
  }
  int SlotsIn(const std::string& worker, const std::string& state) {
    int count = 0;
    for (const auto& node : cluster_.Nodes()) {
      if (node["worker"] != worker) continue;
      for (const auto& slot : node.value("slots", nlohmann::json::array()))
        count += slot.value("state", "") == state;
    }
    return count;
  }
  void ExpectNothingLeft(const std::string& job) {
    EXPECT_TRUE(TrainersOf(job).empty());
    cluster_.Await("shared memory to be gone", absl::Seconds(5),
                   [&] { return testing::NumSharedMemorySegments() == segments_before_; });
  }

  const int segments_before_ = testing::NumSharedMemorySegments();
  Cluster cluster_;
};

TEST_F(KillTest, TrainerKilledFailsTheJobWithItsRankAndSignal) {
  Start();
  const std::string job = RunningJob(kForever, kNoRestarts);
  const pid_t victim = TrainersOf(job).front();
  const int rank = testing::RankOf(victim);
  kill(victim, SIGKILL);
  EXPECT_EQ(cluster_.Upipe({"wait", job}).exit_code, 1);
  const auto described = cluster_.Describe(job);
  ASSERT_EQ(described.value("shown_state", ""), "FAILED");
  EXPECT_EQ(described["cause"].value("signal", 0), SIGKILL) << described["cause"];
  EXPECT_EQ(described["cause"].value("rank", -1), rank) << described["cause"];
  EXPECT_FALSE(described["cause"].value("log_tail", nlohmann::json::array()).empty());
  EXPECT_NE(described["cause"].value("evidence", ""), "");
  cluster_.Await("all slots FREE", absl::Seconds(10), [&] {
    return SlotsIn("w0", "SLOT_STATE_FREE") == 2 && SlotsIn("w1", "SLOT_STATE_FREE") == 2;
  });
  ExpectNothingLeft(job);
}

TEST_F(KillTest, WorkerKilledFailsTheJobAndItsSlotsAreUnknownUntilItSaysHello) {
  Start();
  const std::string job = RunningJob(kForever, kNoRestarts);
  cluster_.KillWorker("w1");
  cluster_.Await("the dead worker's slots to be UNKNOWN", absl::Seconds(10),
                 [&] { return SlotsIn("w1", "SLOT_STATE_UNKNOWN") == 2; });
  EXPECT_EQ(cluster_.Upipe({"wait", job}).exit_code, 1);
  // A peer on the live worker may notice before the coordinator does.
  EXPECT_THAT(cluster_.Describe(job)["cause"].value("kind", ""),
              ::testing::AnyOf("CAUSE_KIND_NODE_LOST", "CAUSE_KIND_PEER_FAILURE"));
  cluster_.Await("the live worker's slots FREE", absl::Seconds(15),
                 [&] { return SlotsIn("w0", "SLOT_STATE_FREE") == 2; });
  ExpectNothingLeft(job);
  cluster_.StartWorker("w1", 2);
  cluster_.Await("its slots FREE after hello", absl::Seconds(15),
                 [&] { return SlotsIn("w1", "SLOT_STATE_FREE") == 2; });
}

TEST_F(KillTest, CoordinatorKilledAndRestartedAdoptsTheRunningJob) {
  Start(/*autonomy_seconds=*/60);
  const std::string job = RunningJob(/*steps=*/400);
  cluster_.KillCoordinator();
  EXPECT_EQ(TrainersOf(job).size(), 4u);
  cluster_.StartCoordinator(60);
  cluster_.Await("both workers READY again", absl::Seconds(20), [&] {
    int ready = 0;
    for (const auto& node : cluster_.Nodes())
      ready += node.value("state", "") == "NODE_STATE_READY";
    return ready == 2;
  });
  EXPECT_EQ(cluster_.Upipe({"wait", job}, absl::Seconds(120)).exit_code, 0);
  EXPECT_EQ(cluster_.Describe(job).value("generation", ""), "1");
  ExpectNothingLeft(job);
}

// The generation after it has nothing left to commit, and tidies up all the same.
TEST_F(KillTest, KilledBesideTheLastCheckpointNoMoreThanKeepStay) {
  const std::string failpoint = cluster_.folder() + "/failpoint";
  std::ofstream(failpoint) << failpoints::kCheckpointRetain << ":kill:2";
  setenv("UPIPE_FAILPOINT_FILE", failpoint.c_str(), 1);
  Start();
  const std::string folder = cluster_.folder() + "/checkpoints";
  const std::string file = cluster_.JobFile(
      "job", 4, 200, absl::StrCat("checkpoint: {path: ", folder, ", every_steps: 100, keep: 1}\n"));
  const CommandResult result = cluster_.Upipe({"submit", file, "-o", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const std::string job = nlohmann::json::parse(result.output).value("id", "");
  EXPECT_EQ(cluster_.Upipe({"wait", job}, absl::Seconds(60)).exit_code, 0);
  unsetenv("UPIPE_FAILPOINT_FILE");
  EXPECT_FALSE(std::filesystem::exists(failpoint)) << "nobody was killed";
  EXPECT_EQ(cluster_.Describe(job).value("generation", ""), "2");
  std::vector<std::string> steps;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_directory() && entry.path().filename().string()[0] == 's')
      steps.push_back(entry.path().filename());
  }
  EXPECT_THAT(steps, ::testing::ElementsAre("s200"));
  ExpectNothingLeft(job);
}

TEST_F(KillTest, CoordinatorGoneForGoodWorkersKillTheirRanksAfterA) {
  Start();
  const std::string job = RunningJob();
  cluster_.KillCoordinator();
  EXPECT_EQ(TrainersOf(job).size(), 4u);
  cluster_.Await("the workers to kill their ranks", absl::Seconds(15),
                 [&] { return TrainersOf(job).empty(); });
  ExpectNothingLeft(job);
}

}  // namespace
}  // namespace upipe
