// Every verb of somebody who runs the cluster, with the built `upipe` against real daemons and
// trainers: holding and asking why, checkpoints and their check, draining, stopping with grace,
// logs of an attempt that was killed, backup and restore, fencing and forgetting, the support
// bundle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using testing::BinDir;
using testing::Cluster;
using testing::CommandResult;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RunCommand;
using testing::TrainersOf;

constexpr int kForever = 1000000;
constexpr absl::Duration kPatience = absl::Seconds(60);

json Parsed(const std::string& text) {
  const json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  EXPECT_TRUE(value.is_object()) << text;
  return value.is_object() ? value : json::object();
}

class OperatorVerbs : public ::testing::Test {
 protected:
  OperatorVerbs() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-operator-", getpid())) {
    StartCoordinator();
    cluster_.StartWorker("w0", 2);
    cluster_.StartWorker("w1", 2);
  }
  void StartCoordinator() {
    cluster_.StartCoordinator(/*autonomy_seconds=*/3, {"--backoff", "0.1"});
  }

  std::string Root() const { return cluster_.folder() + "/checkpoints"; }

  // A job that trains for ever and checkpoints every few steps.
  std::string JobFile(const std::string& name, int ranks, const std::string& extra = "") {
    return cluster_.JobFile(
        name, ranks, kForever,
        absl::StrCat("checkpoint: {path: ", Root(), ", every_steps: 4, keep: 2}\n", extra));
  }
  std::string Submit(const std::string& file, std::vector<std::string> options = {}) {
    std::vector<std::string> arguments = {"submit", file, "-o", "json"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return Answer(arguments).value("id", "");
  }
  // What a verb that must work prints with -o json.
  json Answer(const std::vector<std::string>& arguments) {
    const CommandResult result = cluster_.Upipe(arguments);
    EXPECT_EQ(result.exit_code, 0) << absl::StrCat(arguments[0], ": ", result.errors);
    return Parsed(result.output);
  }
  json Why(const std::string& job) { return Answer({"why", job, "-o", "json"}); }
  json NodeOf(const std::string& worker) {
    for (const json& node : cluster_.Nodes()) {
      if (node.value("worker", "") == worker) return node;
    }
    return json::object();
  }
  std::string WorkerOf(const std::string& job) {
    const json described = cluster_.Describe(job);
    return described.contains("ranks") && !described["ranks"].empty()
               ? described["ranks"][0].value("node", "")
               : "";
  }
  void AwaitGeneration(const std::string& job, const std::string& generation) {
    cluster_.Await(absl::StrCat(job, " to run as generation ", generation), kPatience, [&] {
      const json described = cluster_.Describe(job);
      return described.value("generation", "") == generation &&
             described.value("shown_state", "") == "RUNNING";
    });
  }
  // Until generation `generation` of the job has committed a checkpoint.
  void AwaitCommit(const std::string& job, const std::string& generation = "1") {
    cluster_.Await(absl::StrCat("a checkpoint of ", job), kPatience, [&] {
      const json described = cluster_.Describe(job);
      return described.contains("last_commit") &&
             described["last_commit"].value("generation", "") == generation;
    });
  }
  // SIGKILL to one rank; returns its pid.
  pid_t KillRank(const std::string& job, int rank) {
    for (const pid_t trainer : TrainersOf(job)) {
      if (testing::RankOf(trainer) != rank) continue;
      kill(trainer, SIGKILL);
      return trainer;
    }
    ADD_FAILURE() << "no rank " << rank << " of " << job;
    return -1;
  }

  Cluster cluster_;
};

TEST_F(OperatorVerbs, AHeldJobSaysWhyIsReleasedAndLeavesACheckpointThatVerifies) {
  const std::string job = Submit(JobFile("held", 2), {"--hold"});
  cluster_.AwaitState(job, "HELD", kPatience);
  EXPECT_EQ(Why(job).value("reason", ""), "WAIT_REASON_HELD");
  const CommandResult why = cluster_.Upipe({"why", "held"});  // by a beginning, for people
  EXPECT_EQ(why.exit_code, 0);
  EXPECT_THAT(why.output, HasSubstr("held until it is released"));
  EXPECT_TRUE(TrainersOf(job).empty());

  EXPECT_EQ(cluster_.Upipe({"release", job}).exit_code, 0);
  AwaitCommit(job);
  EXPECT_EQ(Why(job).value("reason", ""), "WAIT_REASON_RUNNING");

  // It ends at a step boundary, and that step is the checkpoint.
  EXPECT_EQ(cluster_.Upipe({"cancel", job, "--grace", "1m"}).exit_code, 0);
  EXPECT_EQ(cluster_.Upipe({"wait", job}).exit_code, 3);
  const json described = cluster_.Describe(job);
  EXPECT_EQ(described["last_commit"]["step"], described["last_report"]["step"]) << described;
  EXPECT_EQ(cluster_.Upipe({"release", job}).exit_code, 1);

  const json checkpoints = Answer({"checkpoints", job, "-o", "json"});
  EXPECT_EQ(checkpoints["last_commit"], described["last_commit"]);
  ASSERT_TRUE(checkpoints["folder"].is_array() && !checkpoints["folder"].empty()) << checkpoints;
  const json newest = checkpoints["folder"][0];
  EXPECT_EQ(absl::StrCat(newest.value("step", 0)), described["last_commit"]["step"]);
  EXPECT_TRUE(newest.value("committed", false));
  EXPECT_EQ(newest.value("shards", 0), 2);

  const CommandResult whole = cluster_.Upipe({"verify", Root()});
  EXPECT_EQ(whole.exit_code, 0) << whole.errors;
  EXPECT_THAT(whole.output,
              AllOf(HasSubstr(newest.value("path", "?")),
                    HasSubstr(described["last_commit"].value("content_sha256", "?"))));
  const std::string copy = cluster_.folder() + "/kept for the paper";
  fs::copy(newest.value("path", ""), copy);
  EXPECT_EQ(cluster_.Upipe({"verify", copy + "/"}).exit_code, 0);
  const std::string shard = newest.value("path", "") + "/rank-1.shard";
  std::fstream(shard, std::ios::in | std::ios::out | std::ios::binary).seekp(2000) << "damage";
  const CommandResult damaged = cluster_.Upipe({"verify", newest.value("path", "")});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_THAT(damaged.output, AllOf(HasSubstr("damaged"), HasSubstr(shard)));
}

TEST_F(OperatorVerbs, ADrainedWorkerIsEmptyAndItsJobGoesOnElsewhere) {
  EXPECT_EQ(cluster_.Upipe({"cordon", "w1"}).exit_code, 0);
  const std::string job = Submit(JobFile("moved", 2));
  AwaitCommit(job);
  ASSERT_EQ(WorkerOf(job), "w0");
  const std::string large = Submit(JobFile("large", 4));
  EXPECT_EQ(cluster_.Upipe({"uncordon", "w1"}).exit_code, 0);

  const json drained = Answer({"drain", "w0", "--wait", "--reason", "new disk", "-o", "json"});
  EXPECT_THAT(drained["job_ids"], Contains(job));
  for (const json& slot : drained["node"]["slots"]) EXPECT_EQ(slot["state"], "SLOT_STATE_FREE");
  const CommandResult nodes = cluster_.Upipe({"nodes"});
  EXPECT_THAT(nodes.output, AllOf(HasSubstr("READY, cordoned"), HasSubstr("new disk")));

  AwaitGeneration(job, "2");
  const json moved = cluster_.Describe(job);
  EXPECT_EQ(WorkerOf(job), "w1");
  ASSERT_EQ(moved["attempts"].size(), 1u);
  EXPECT_EQ(moved["attempts"][0].value("intent", ""), "STOP_INTENT_REQUEUE");
  // The last step before it left is the one it goes on from, and nothing is charged.
  EXPECT_EQ(moved["resume"]["step"], moved["attempts"][0]["last_step"]) << moved["attempts"];
  EXPECT_EQ(
      moved["restarts"].value("infrastructure", 0) + moved["restarts"].value("application", 0), 0);
  EXPECT_EQ(Why(large).value("reason", ""), "WAIT_REASON_CORDONED");

  EXPECT_EQ(cluster_.Upipe({"uncordon", "w0"}).exit_code, 0);
  EXPECT_EQ(cluster_.Upipe({"cancel", job, "--grace", "0s"}).exit_code, 0);
  cluster_.AwaitState(large, "RUNNING", kPatience);
}

TEST_F(OperatorVerbs, LogsOfAKilledAttemptAreReadAndABundleHoldsThem) {
  const std::string job =
      Submit(JobFile("killed", 2, "restarts: {infrastructure: 1, application: 1}\n"));
  AwaitCommit(job);
  const pid_t first = KillRank(job, 1);
  AwaitGeneration(job, "2");
  const auto log = [&](const std::string& generation) {
    return cluster_.Upipe({"logs", job, "--rank", "1", "--generation", generation}).output;
  };
  EXPECT_THAT(log("1"), HasSubstr(absl::StrCat("process ", first, ",")));
  AwaitCommit(job, "2");
  const pid_t second = KillRank(job, 1);
  EXPECT_EQ(cluster_.Upipe({"wait", job}).exit_code, 1);
  EXPECT_THAT(log("1"), HasSubstr(absl::StrCat("process ", first, ",")));
  EXPECT_THAT(log("2"), HasSubstr(absl::StrCat("process ", second, ",")));
  EXPECT_EQ(cluster_.Upipe({"logs", job, "--generation", "3"}).exit_code, 2);
  const CommandResult told = cluster_.Upipe({"describe", job});
  EXPECT_THAT(told.output, AllOf(HasSubstr("Earlier attempts"), HasSubstr("rank 1 on "),
                                 HasSubstr("not started again")));

  const std::string file = cluster_.folder() + "/bundle.tar.gz";
  const json bundle = Answer({"support-bundle", "--file", file, "-o", "json"});
  EXPECT_EQ(bundle.value("missing", json("absent")), json::array());
  const CommandResult list = RunCommand({"tar", "-tzf", file});
  const std::vector<std::string> members = absl::StrSplit(list.output, '\n', absl::SkipEmpty());
  EXPECT_EQ(static_cast<int>(members.size()), bundle.value("files", 0));
  for (const std::string& name :
       {std::string("README.txt"), std::string("versions.txt"), std::string("configuration.txt"),
        std::string("nodes.json"), std::string("metrics/coordinator.txt"),
        std::string("metrics/worker-w0.txt"), std::string("metrics/worker-w1.txt"),
        absl::StrCat("jobs/", job, ".json"), absl::StrCat("logs/", job, "-g2-r1.log")}) {
    EXPECT_THAT(members, Contains("upipe-support/" + name));
  }
}

TEST_F(OperatorVerbs, ARestoredStoreGoesOnAboveWhatTheWorkersSaw) {
  const std::string job = Submit(JobFile("kept", 2));
  AwaitCommit(job);
  const std::string file = cluster_.folder() + "/coordinator.backup";
  const json backup = Answer({"admin", "backup", file, "-o", "json"});
  EXPECT_EQ(backup.value("bytes", 0u), fs::file_size(file));
  // What the backup does not know: another attempt, another job.
  KillRank(job, 0);
  AwaitGeneration(job, "2");
  AwaitCommit(job, "2");
  const std::string later = Submit(JobFile("later", 2));
  cluster_.AwaitState(later, "RUNNING", kPatience);

  cluster_.Signal("coordinator", SIGTERM);
  EXPECT_EQ(cluster_.ReapCoordinator(), 0);
  const std::string state = cluster_.folder() + "/coordinator";
  fs::rename(state, state + "-before");
  const auto restore = [&](const std::string& sha256) {
    return RunCommand({BinDir() + "/upipe-coordinator", "--state-dir", state, "--restore", file,
                       "--restore-sha256", sha256});
  };
  const std::string sha256 = backup.value("sha256", "");
  EXPECT_EQ(restore(std::string(64, '0')).exit_code, 1);
  EXPECT_FALSE(fs::exists(state + "/coordinator.sqlite"));
  EXPECT_EQ(restore(sha256).exit_code, 0);
  EXPECT_EQ(restore(sha256).exit_code, 1);  // there is a store already

  StartCoordinator();
  cluster_.Await("it to run above generation 2", kPatience, [&] {
    const json described = cluster_.Describe(job);
    return described.value("shown_state", "") == "RUNNING" &&
           std::stoll(described.value("generation", "0")) > 2;
  });
  EXPECT_EQ(cluster_.Describe(job)["resume"].value("generation", ""), "2");
  EXPECT_EQ(cluster_.Upipe({"describe", later}).exit_code, 2);
  cluster_.Await("the ranks nobody knows to be gone", kPatience,
                 [&] { return TrainersOf(later).empty() && TrainersOf(job).size() == 2; });
}

TEST_F(OperatorVerbs, ASilentWorkerIsFencedAndForgotten) {
  const std::string job = Submit(JobFile("fenced", 2));
  AwaitCommit(job);
  const std::string silent = WorkerOf(job);
  EXPECT_EQ(cluster_.Upipe({"node", "fence", silent, "--yes"}).exit_code, 1);  // it is heard

  cluster_.Signal(silent, SIGSTOP);
  cluster_.Await("it to be SUSPECT", kPatience,
                 [&] { return NodeOf(silent).value("state", "") == "NODE_STATE_SUSPECT"; });
  const CommandResult unsaid = cluster_.Upipe({"node", "fence", silent});
  EXPECT_EQ(unsaid.exit_code, 2);
  EXPECT_THAT(unsaid.errors, HasSubstr("--yes"));
  const CommandResult early = cluster_.Upipe({"node", "forget", silent, "--yes"});
  EXPECT_EQ(early.exit_code, 1);
  EXPECT_THAT(early.errors, AllOf(HasSubstr("not lost yet"), HasSubstr("fence")));
  EXPECT_EQ(Answer({"node", "fence", silent, "--yes", "-o", "json"}).value("state", ""),
            "NODE_STATE_LOST");

  AwaitGeneration(job, "2");
  EXPECT_NE(WorkerOf(job), silent);
  const json attempt = cluster_.Describe(job)["attempts"][0];
  EXPECT_EQ(attempt.value("ranks_presumed_gone", 0), 2) << attempt;
  EXPECT_THAT(attempt["cause"].value("message", ""), HasSubstr("fenced"));

  EXPECT_EQ(cluster_.Upipe({"node", "forget", silent, "--yes"}).exit_code, 0);
  EXPECT_EQ(NodeOf(silent), json::object());
  EXPECT_EQ(cluster_.Upipe({"drain", silent}).exit_code, 2);

  cluster_.Signal(silent, SIGCONT);  // it says hello as one nobody knows, and its old ranks end
  cluster_.Await("the returned worker's slots to be FREE", kPatience, [&] {
    int free = 0;
    for (const json& slot : NodeOf(silent).value("slots", json::array()))
      free += slot.value("state", "") == "SLOT_STATE_FREE";
    return free == 2;
  });
  EXPECT_EQ(TrainersOf(job).size(), 2u);
}

TEST(CommandLines, WhatCannotBeReadExitsWith2) {
  for (const char* name : {"upipe", "upipe-coordinator", "upipe-worker", "upipe-plan", "upipe-run",
                           "upipe-data", "upipe-verify"}) {
    const CommandResult wrong = RunCommand({BinDir() + "/" + name, "--no-such-option"});
    EXPECT_EQ(wrong.exit_code, 2) << name << ": " << wrong.errors;
    EXPECT_NE(wrong.errors, "") << name;
    EXPECT_EQ(RunCommand({BinDir() + "/" + name, "--help"}).exit_code, 0) << name;
  }
}

}  // namespace
}  // namespace upipe
