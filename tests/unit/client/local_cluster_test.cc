// `upipe local` with shell scripts in the place of the daemons: real processes, no network.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/local/cluster_file.h"
#include "client/local/daemon_process.h"
#include "client/local/local_commands.h"
#include "tests/unit/client/fake_coordinator.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

constexpr char kCoordinatorScript[] =
    "#!/bin/sh\n"
    "while [ $# -gt 0 ]; do [ \"$1\" = --address-file ] && file=$2; shift; done\n"
    "echo serving\necho 127.0.0.1:4242 > \"$file\"\nexec sleep 600\n";
constexpr char kWorkerScript[] = "#!/bin/sh\necho \"$@\"\nexec sleep 600\n";
constexpr char kBrokenWorkerScript[] = "#!/bin/sh\necho no memory left >&2\nexit 3\n";
// As a worker whose ranks do not reach the end of their step: only the second signal ends it.
constexpr char kSlowWorkerScript[] =
    "#!/bin/sh\nterms=0\n"
    "trap 'terms=$((terms + 1)); echo told $terms; [ $terms = 2 ] && exit 0' TERM\n"
    "echo ignoring\nwhile :; do sleep 600 & wait; done\n";
constexpr char kStubbornWorkerScript[] =
    "#!/bin/sh\ntrap '' TERM\necho ignoring\nwhile :; do sleep 600 & wait; done\n";

class LocalClusterTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string folder = testing::TempDir() + "/upipe-local-XXXXXX";
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    root_ = folder;
    std::filesystem::create_directory(root_ + "/bin");
    Install("upipe-coordinator", kCoordinatorScript);
    Install("upipe-worker", kWorkerScript);
  }

  void TearDown() override {
    LocalDown(Console());
    // The daemons are children of this test, which reaps them as init would.
    while (waitpid(-1, nullptr, WNOHANG) > 0) {
    }
    std::filesystem::remove_all(root_);
  }

  void Install(const std::string& name, const char* script) {
    const std::string path = absl::StrCat(root_, "/bin/", name);
    std::ofstream(path, std::ios::trunc) << script;
    chmod(path.c_str(), 0700);
  }

  // A coordinator at which `ready_workers_` workers are READY.
  LocalConsole Console() {
    return {root_ + "/state",
            root_ + "/bin",
            out_,
            err_,
            [this](const std::string& address) {
              connected_ = address;
              auto coordinator = std::make_unique<FakeCoordinator>();
              for (int i = 0; i < 4; ++i) {
                v1::Node& node = *coordinator->nodes.add_nodes();
                node.set_worker(absl::StrCat("worker-", i));
                node.set_state(v1::NODE_STATE_READY);
              }
              return coordinator;
            },
            stop_limit_,
            hurry_limit_};
  }

  // Up with one worker of that script, which says "ignoring" once its trap is set.
  void UpWith(const char* script) {
    Install("upipe-worker", script);
    ASSERT_EQ(LocalUp(Console(), {}), kExitDone) << err_.str();
    const auto cluster = ReadCluster(root_ + "/state");
    worker_ = cluster->daemons[1].process;
    while (ReadLog("worker-0").find("ignoring") == std::string::npos) {
      ASSERT_TRUE(IsAlive(worker_));
      sched_yield();
    }
  }

  std::string ReadLog(const std::string& name) {
    std::ifstream file(absl::StrCat(root_, "/state/logs/", name, ".log"));
    return std::string(std::istreambuf_iterator<char>(file), {});
  }

  std::string root_;
  std::string connected_;
  ProcessIdentity worker_;  // that UpWith started
  absl::Duration stop_limit_ = absl::Seconds(20);
  absl::Duration hurry_limit_ = absl::Seconds(20);
  std::ostringstream out_, err_;
};

TEST_F(LocalClusterTest, UpStartsEverythingAndDownEndsIt) {
  ASSERT_EQ(LocalUp(Console(), {.workers = 2, .ranks_per_worker = 3, .memory_per_rank = 4096}),
            kExitDone)
      << err_.str();
  EXPECT_EQ(connected_, "127.0.0.1:4242");
  EXPECT_EQ(LocalAddress(root_ + "/state"), "127.0.0.1:4242");
  const auto cluster = ReadCluster(root_ + "/state");
  ASSERT_TRUE(cluster.ok());
  ASSERT_THAT(cluster->daemons, SizeIs(3));
  for (const LocalDaemon& daemon : cluster->daemons) {
    EXPECT_TRUE(IsAlive(daemon.process)) << daemon.name;
    EXPECT_EQ(getsid(daemon.process.pid), daemon.process.pid);
  }
  EXPECT_EQ(LocalStatus(Console()), kExitDone);
  EXPECT_EQ(LocalDown(Console()), kExitDone) << err_.str();
  for (const LocalDaemon& daemon : cluster->daemons)
    EXPECT_FALSE(IsAlive(daemon.process)) << daemon.name;
  EXPECT_EQ(LocalAddress(root_ + "/state"), std::nullopt);
  EXPECT_EQ(err_.str(), "");
  EXPECT_EQ(LocalDown(Console()), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("Nothing is up"));
}

TEST_F(LocalClusterTest, WorkersAreToldWhatTheyNeed) {
  ASSERT_EQ(LocalUp(Console(), {.workers = 1, .ranks_per_worker = 3, .memory_per_rank = 4096}),
            kExitDone)
      << err_.str();
  // `up` returns when the coordinator calls the worker READY, which the fake one does at once.
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (ReadLog("worker-0").find('\n') == std::string::npos && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_THAT(ReadLog("worker-0"),
              AllOf(HasSubstr("--coordinator 127.0.0.1:4242 --name worker-0 --node "),
                    HasSubstr("--slots 3 --memory-per-rank 4096 --state-dir "),
                    HasSubstr("/state/worker-0")));
}

TEST_F(LocalClusterTest, ASecondUpIsRefused) {
  ASSERT_EQ(LocalUp(Console(), {}), kExitDone) << err_.str();
  const auto cluster = ReadCluster(root_ + "/state");
  EXPECT_EQ(LocalUp(Console(), {}), kExitFailed);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("already up at 127.0.0.1:4242: coordinator (pid "),
                                HasSubstr("upipe local down")));
  EXPECT_TRUE(IsAlive(cluster->daemons[0].process));
}

TEST_F(LocalClusterTest, AFailedUpLeavesNothingAndShowsTheLog) {
  Install("upipe-worker", kBrokenWorkerScript);
  EXPECT_EQ(LocalUp(Console(), {.workers = 2}), kExitFailed);
  EXPECT_THAT(err_.str(),
              AllOf(HasSubstr("worker-0 ended while starting"), HasSubstr("no memory left")));
  EXPECT_EQ(ReadCluster(root_ + "/state").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(LocalClusterTest, AMissingBinaryIsNamed) {
  std::filesystem::remove(root_ + "/bin/upipe-worker");
  EXPECT_EQ(LocalUp(Console(), {}), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("/bin/upipe-worker"));
}

TEST_F(LocalClusterTest, AWorkerThatIsSlowToLeaveIsToldTwiceAndNotKilled) {
  UpWith(kSlowWorkerScript);
  stop_limit_ = absl::Milliseconds(50);
  EXPECT_EQ(LocalDown(Console()), kExitDone);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("worker-0 (pid "),
                                HasSubstr("did not end within 50 ms and was told again"),
                                Not(HasSubstr("killed"))));
  EXPECT_THAT(ReadLog("worker-0"), HasSubstr("told 2"));
  kill(-worker_.pid, SIGKILL);  // the script's own `sleep`, in its session
}

TEST_F(LocalClusterTest, WhatIgnoresSigtermIsKilledAndSaid) {
  UpWith(kStubbornWorkerScript);
  stop_limit_ = hurry_limit_ = absl::Milliseconds(50);
  EXPECT_EQ(LocalDown(Console()), kExitDone);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("worker-0 (pid "),
                                HasSubstr("did not end within 50 ms more and was killed")));
  EXPECT_FALSE(IsAlive(worker_));
  kill(-worker_.pid, SIGKILL);
}

TEST_F(LocalClusterTest, AStrangerWithTheSamePidIsNeverTouched) {
  const auto stranger = StartDaemon({"/bin/sleep", "600"}, root_ + "/stranger.log");
  ASSERT_TRUE(stranger.ok()) << stranger.status();
  ProcessIdentity earlier = *stranger, other_boot = *stranger;
  earlier.start_ticks -= 1;
  other_boot.boot_id = "another";
  std::filesystem::create_directories(root_ + "/state");
  ASSERT_TRUE(
      WriteCluster(root_ + "/state",
                   {"127.0.0.1:1", {{"coordinator", earlier, ""}, {"worker-0", other_boot, ""}}})
          .ok());
  EXPECT_FALSE(IsAlive(earlier));
  EXPECT_FALSE(IsAlive(other_boot));
  EXPECT_EQ(LocalDown(Console()), kExitDone);
  EXPECT_TRUE(IsAlive(*stranger));
  const auto process = LiveProcess::Find(*stranger);
  ASSERT_TRUE(process.ok());
  EXPECT_TRUE(process->Signal(SIGKILL).ok());
  EXPECT_TRUE(process->AwaitExit(absl::Seconds(20)));
}

TEST_F(LocalClusterTest, AStaleFileDoesNotStopUp) {
  std::filesystem::create_directories(root_ + "/state");
  ASSERT_TRUE(WriteCluster(root_ + "/state",
                           {"127.0.0.1:1", {{"coordinator", {1, 12345, "an earlier boot"}, ""}}})
                  .ok());
  EXPECT_EQ(LocalUp(Console(), {}), kExitDone) << err_.str();
}

TEST(ClusterFile, RoundTripsAndRefusesGarbage) {
  const LocalCluster cluster{"127.0.0.1:5", {{"coordinator", {12, 345, "boot"}, "/log\"x"}}};
  const auto again = ClusterFromJson(ClusterToJson(cluster));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(ClusterToJson(*again), ClusterToJson(cluster));
  for (const char* bad : {"", "{", "[]", "{}", "{\"address\": 5, \"daemons\": []}",
                          "{\"address\": \"\", \"daemons\": [{}]}"}) {
    EXPECT_EQ(ClusterFromJson(bad).status().code(), absl::StatusCode::kDataLoss) << bad;
  }
}

}  // namespace
}  // namespace upipe::client
