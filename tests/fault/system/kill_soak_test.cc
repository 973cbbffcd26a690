// Many kills under several jobs at once: of trainers, workers and the coordinator, at random
// moments, on named failpoints, and inside rendezvous, checkpoint and stopping. Every job ends
// SUCCEEDED with the bits of an undisturbed run, and nothing is left behind. Where the kills landed
// is printed. `./dev soak faults` is the long form: UPIPE_SOAK_KILLS, UPIPE_SOAK_SEED, and a JSON
// file in UPIPE_SOAK_REPORT.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "benchmarks/support/bench_report.h"
#include "common/failpoint.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

namespace fs = std::filesystem;
using testing::Cluster;
using testing::CommandResult;
using testing::TrainersOf;

int FromEnvironment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  int value = otherwise;
  if (text != nullptr && !absl::SimpleAtoi(text, &value)) {
    ADD_FAILURE() << name << " is no number: " << text;
  }
  return value;
}

// One kind of job: each of its runs must end with the same bits.
struct Program {
  std::string name;
  int ranks = 0;
  std::string content_sha256;  // of the final checkpoint, undisturbed
  std::string running;         // the job that runs now
};

class KillSoakTest : public ::testing::Test {
 protected:
  static constexpr int kWorkers = 3;
  static constexpr int kSteps = 300;

  KillSoakTest()
      : kills_(FromEnvironment("UPIPE_SOAK_KILLS", 25)),
        seed_(FromEnvironment("UPIPE_SOAK_SEED", 1)),
        random_(seed_),
        cluster_(absl::StrCat(::testing::TempDir(), "upipe-soak-", getpid())),
        failpoint_(cluster_.folder() + "/failpoint") {
    setenv("UPIPE_FAILPOINT_FILE", failpoint_.c_str(), 1);
  }
  ~KillSoakTest() override { unsetenv("UPIPE_FAILPOINT_FILE"); }

  void StartCoordinator() {
    cluster_.StartCoordinator(/*autonomy_seconds=*/10, {"--stall-floor", "3", "--backoff", "0.1",
                                                        "--backoff-longest", "0.5"});
  }
  void StartWorker(const std::string& name) {
    cluster_.StartWorker(name, 2, "512MiB", {"--no-cpu-placement"});
  }
  void Start() {
    StartCoordinator();
    for (int w = 0; w < kWorkers; ++w) StartWorker(absl::StrCat("w", w));
  }
  // Until a daemon that was killed is no more.
  void AwaitEnd() {
    cluster_.Await("a daemon to end", absl::Seconds(10), [&] {
      const std::vector<std::string> ended = cluster_.TakeEnded();
      down_.insert(ended.begin(), ended.end());
      return !ended.empty();
    });
  }
  // As a supervisor does.
  void RestartEnded() {
    const std::vector<std::string> ended = cluster_.TakeEnded();
    down_.insert(ended.begin(), ended.end());
    if (down_.erase("coordinator") > 0) StartCoordinator();
    for (const std::string& name : down_) StartWorker(name);
    down_.clear();
  }

  // Empty while there is no answer: who fired a failpoint may not have ended when the file went.
  std::string StateOf(const std::string& job) {
    const CommandResult result = cluster_.Upipe({"describe", job, "-o", "json"});
    if (result.exit_code != 0) {
      RestartEnded();
      return "";
    }
    return nlohmann::json::parse(result.output).value("shown_state", "");
  }

  std::string Submit(const Program& program) {
    const std::string file = cluster_.JobFile(
        program.name, program.ranks, kSteps,
        absl::StrCat(
            "checkpoint: {path: ", cluster_.folder(), "/checkpoints, every_steps: 20}\n",
            "restarts: {infrastructure: 100000, application: 100000, no_progress: 100000}\n"));
    // The same request again, should the coordinator end in between.
    const std::string request = absl::StrCat(program.name, "-", ++requests_);
    CommandResult result;
    cluster_.Await("a submit to be taken", absl::Seconds(30), [&] {
      result = cluster_.Upipe({"submit", file, "--request-id", request, "-o", "json"});
      if (result.exit_code != 0) RestartEnded();
      return result.exit_code == 0;
    });
    const auto job = nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
    return job.is_object() ? job.value("id", "") : "";
  }
  std::string ContentOf(const std::string& job) {
    const auto described = cluster_.Describe(job);
    const auto commit = described.value("last_commit", nlohmann::json::object());
    EXPECT_EQ(commit.value("step", ""), absl::StrCat(kSteps)) << described;
    return commit.value("content_sha256", "");
  }
  void LearnUndisturbed(Program& program) {
    const std::string job = Submit(program);
    ASSERT_EQ(cluster_.Upipe({"wait", job}, absl::Minutes(3)).exit_code, 0)
        << cluster_.Describe(job);
    program.content_sha256 = ContentOf(job);
    ASSERT_EQ(program.content_sha256.size(), 64u);
  }
  // Looks at the job of a program; begins the next one when it has ended.
  void KeepRunning(Program& program) {
    if (program.running.empty()) {
      program.running = Submit(program);
      return;
    }
    const std::string state = StateOf(program.running);
    if (state != "SUCCEEDED" && state != "FAILED" && state != "CANCELLED") return;
    Finish(program);
    program.running = Submit(program);
  }
  void Finish(Program& program) {
    const auto described = cluster_.Describe(program.running);
    EXPECT_EQ(described.value("shown_state", ""), "SUCCEEDED") << described;
    EXPECT_EQ(ContentOf(program.running), program.content_sha256)
        << program.running << " of generation " << described.value("generation", "");
    EXPECT_TRUE(TrainersOf(program.running).empty());
    int generation = 0;
    EXPECT_TRUE(absl::SimpleAtoi(described.value("generation", ""), &generation));
    ++jobs_ended_;
    generations_ += generation;
    program.running.clear();
  }

  // Each returns where the kill landed, or nothing when it found nobody to kill.
  std::string KillOnFailpoint() {
    const size_t number = random_() % std::size(failpoints::kAll);
    const std::string name(failpoints::kAll[number]);
    const bool often = name == failpoints::kCheckpointSystemCall ||
                       name == failpoints::kTrainerStep || name == failpoints::kWorkerOrder;
    const uint64_t hit = 1 + random_() % (often ? 40 : 2);
    std::ofstream(failpoint_ + ".new") << name << ":kill:" << hit;
    fs::rename(failpoint_ + ".new", failpoint_);
    const absl::Time until = absl::Now() + absl::Seconds(6);
    while (fs::exists(failpoint_) && absl::Now() < until) {
      absl::SleepFor(absl::Milliseconds(5));
    }
    if (unlink(failpoint_.c_str()) == 0) return "";
    if (absl::StartsWith(name, "coordinator.") || absl::StartsWith(name, "worker.")) AwaitEnd();
    return name;
  }
  std::string KillAnybody() {
    const uint64_t choice = random_() % 10;
    if (choice == 0) {
      cluster_.Signal("coordinator", SIGKILL);
      AwaitEnd();
      return "coordinator";
    }
    if (choice <= 2) {
      cluster_.Signal(absl::StrCat("w", random_() % kWorkers), SIGKILL);
      AwaitEnd();
      return "worker";
    }
    std::vector<pid_t> trainers;
    for (const Program& program : programs_) {
      for (pid_t pid : TrainersOf(program.running)) trainers.push_back(pid);
    }
    if (trainers.empty()) return "";
    const pid_t victim = trainers[random_() % trainers.size()];
    if (kill(victim, choice == 3 ? SIGSTOP : SIGKILL) != 0) return "";
    return choice == 3 ? "trainer, stopped" : "trainer";
  }
  // The second of two kills, while a job is in `state` because of the first.
  std::string KillInside(const std::string& state) {
    const Program& program = programs_[random_() % programs_.size()];
    const std::vector<pid_t> trainers = TrainersOf(program.running);
    if (trainers.empty()) return "";
    kill(trainers[random_() % trainers.size()], SIGKILL);
    Landed("trainer");
    const absl::Time until = absl::Now() + absl::Seconds(6);
    while (absl::Now() < until) {
      if (StateOf(program.running) != state) continue;
      const std::string who = KillAnybody();
      return who.empty() ? "" : absl::StrCat("inside ", state, ": ", who);
    }
    return "";
  }
  void Landed(const std::string& where) {
    if (where.empty()) return;
    ++landed_;
    ++histogram_[where];
    const bool random = where == "trainer" || where == "worker" || where == "coordinator" ||
                        where == "trainer, stopped";
    if (!random) ++aimed_;
  }

  void Report(absl::Duration took) {
    const char* commit = std::getenv("UPIPE_SOAK_COMMIT");
    nlohmann::ordered_json report =
        bench::ReportHead(commit == nullptr ? "unknown" : commit, 0, nullptr);
    report["command"] = absl::StrCat("UPIPE_SOAK_SEED=", seed_, " ./dev soak faults ", kills_);
    report["kills"] = landed_;
    report["aimed"] = aimed_;
    report["seconds"] = absl::ToDoubleSeconds(took);
    report["workers"] = kWorkers;
    report["jobs_ended"] = jobs_ended_;
    report["generations"] = generations_;
    report["histogram"] = histogram_;
    EXPECT_TRUE(bench::WriteReport(report, ""));
    if (const char* path = std::getenv("UPIPE_SOAK_REPORT")) {
      EXPECT_TRUE(bench::WriteReport(report, path));
    }
  }
  void ExpectNothingLeft() {
    cluster_.Await("every slot FREE", absl::Seconds(20), [&] {
      int free = 0;
      for (const auto& node : cluster_.Nodes()) {
        for (const auto& slot : node.value("slots", nlohmann::json::array())) {
          free += slot.value("state", "") == "SLOT_STATE_FREE" ? 1 : 0;
        }
      }
      return free == 2 * kWorkers;
    });
    cluster_.Await("shared memory to be gone", absl::Seconds(5),
                   [&] { return testing::NumSharedMemorySegments() == segments_before_; });
    for (const auto& file : fs::recursive_directory_iterator(cluster_.folder() + "/checkpoints")) {
      if (!file.is_directory() || file.path().filename().string()[0] != 's') continue;
      EXPECT_TRUE(fs::exists(file.path() / "MANIFEST")) << "unfinished: " << file.path();
    }
  }

  const int kills_;
  const int seed_;
  std::mt19937_64 random_;
  const int segments_before_ = testing::NumSharedMemorySegments();
  Cluster cluster_;
  const std::string failpoint_;
  std::vector<Program> programs_ = {{"wide", 4, "", ""}, {"narrow", 2, "", ""}};
  std::set<std::string> down_;  // daemons
  std::map<std::string, int> histogram_;
  int landed_ = 0, aimed_ = 0, jobs_ended_ = 0, generations_ = 0, requests_ = 0;
};

TEST_F(KillSoakTest, EveryJobEndsWithTheBitsOfAnUndisturbedRun) {
  const absl::Time begin = absl::Now();
  Start();
  for (Program& program : programs_) ASSERT_NO_FATAL_FAILURE(LearnUndisturbed(program));
  while (landed_ < kills_ && !HasFailure()) {
    RestartEnded();
    for (Program& program : programs_) KeepRunning(program);
    const uint64_t choice = random_() % 20;
    if (choice < 11) {
      Landed(KillOnFailpoint());
    } else if (choice < 13) {
      Landed(KillInside("RESTARTING"));
    } else if (choice < 15) {
      Landed(KillInside("STARTING"));
    } else {
      absl::SleepFor(absl::Milliseconds(random_() % 1000));  // any moment
      Landed(KillAnybody());
    }
  }
  RestartEnded();
  for (Program& program : programs_) {
    if (program.running.empty()) continue;
    EXPECT_EQ(cluster_.Upipe({"wait", program.running}, absl::Minutes(3)).exit_code, 0);
    Finish(program);
  }
  ExpectNothingLeft();
  Report(absl::Now() - begin);
  EXPECT_GE(2 * aimed_, landed_) << "too few on failpoints or inside a state";
}

}  // namespace
}  // namespace upipe
