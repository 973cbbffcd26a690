// A real upipe-worker, real processes and a coordinator in the test: what the control plane
// promises when trainers, worker or coordinator die.
#include <arpa/inet.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/clock.h"
#include "common/ids.h"
#include "common/metrics/step_line.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/worker/fake_coordinator.h"
#include "tests/fault/worker/worker_process.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What GET /metrics of `address` answers.
std::string Scrape(const std::string& address) {
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(colon + 1))));
  inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  std::string answer;
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0 &&
      write(fd, request.data(), request.size()) == static_cast<ssize_t>(request.size())) {
    char buffer[4096];
    for (ssize_t got = read(fd, buffer, sizeof buffer); got > 0;
         got = read(fd, buffer, sizeof buffer)) {
      answer.append(buffer, static_cast<size_t>(got));
    }
  }
  close(fd);
  return answer;
}

// A v1 cgroup of one controller, where this machine lets us make one.
class V1Cgroup {
 public:
  explicit V1Cgroup(const std::string& controller)
      : path_(absl::StrCat("/sys/fs/cgroup/", controller, "/upipe-test-", getpid())),
        made_(mkdir(path_.c_str(), 0755) == 0 && access(Path("cgroup.procs").c_str(), W_OK) == 0) {}
  V1Cgroup(const V1Cgroup&) = delete;
  V1Cgroup& operator=(const V1Cgroup&) = delete;
  ~V1Cgroup() {
    if (!made_) return;
    EXPECT_TRUE(Eventually([this] { return rmdir(path_.c_str()) == 0; })) << path_;
  }
  bool made() const { return made_; }
  bool Set(const std::string& file, const std::string& value) const {
    std::ofstream stream(Path(file));
    stream << value << std::flush;
    return stream.good();
  }
  std::string Get(const std::string& file) const {
    std::string word;
    std::ifstream(Path(file)) >> word;
    return word;
  }

 private:
  std::string Path(const std::string& file) const { return path_ + "/" + file; }
  const std::string path_;
  const bool made_;
};

// Both containments, where this machine has cgroup2.
class WorkerFault : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !FindWritableCgroup2().has_value())
      GTEST_SKIP() << "no writable cgroup2 here";
    std::string pattern = (std::filesystem::temp_directory_path() / "worker-fault-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    std::filesystem::create_directories(state_dir());
    coordinator_ = std::make_unique<FakeCoordinator>();
    StartWorker();
    ASSERT_TRUE(coordinator_->WaitUntil([&] { return !coordinator_->hellos.empty(); }));
  }
  void TearDown() override {
    if (root_.empty()) return;
    if (worker_ != nullptr) worker_.reset();
    ExpectNothingLeft();
    if (HasFailure()) {
      std::ifstream log(root_ + "/worker.log");
      std::stringstream text;
      text << log.rdbuf();
      std::cerr << text.str();
    }
    std::filesystem::remove_all(root_);
  }
  std::string state_dir() const { return root_ + "/state"; }
  std::string RankDir(int64_t generation, int rank) const {
    return absl::StrCat(state_dir(), "/ranks/job-1/g", generation, "/r", rank);
  }
  void StartWorker(const std::string& leave_grace = "1m") {
    worker_ = std::make_unique<WorkerProcess>(
        WorkerProcess::Options{.coordinator = coordinator_->address(),
                               .root = root_,
                               .trainer_binary = FAKE_TRAINER,
                               .cgroup = GetParam(),
                               .leave_grace = leave_grace});
  }
  std::string NewNonce() { return nonces_.emplace_back(RandomNonce()); }

  std::vector<int> Processes() const {
    std::vector<int> pids;
    for (const std::string& nonce : nonces_) {
      for (int rank = 0; rank < 2; ++rank) {
        for (const int pid : ProcessesOf({nonce, rank})) pids.push_back(pid);
      }
    }
    return pids;
  }
  void ExpectNothingLeft() {
    EXPECT_THAT(Processes(), ElementsAre());
    for (const std::string& nonce : nonces_) {
      for (int rank = 0; rank < 2; ++rank) {
        if (const auto folder = FindWritableCgroup2(); folder.has_value()) {
          EXPECT_FALSE(std::filesystem::exists(absl::StrCat(*folder, "/upipe-", nonce, "-", rank)));
        }
      }
      for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
        EXPECT_FALSE(absl::StrContains(entry.path().string(), nonce)) << entry.path();
      }
    }
  }
  // Two ranks, past the rendezvous.
  std::string StartTwo(const std::string& mode, int64_t generation = 1) {
    const std::string nonce = NewNonce();
    for (int rank = 0; rank < 2; ++rank)
      coordinator_->Start(mode, generation, nonce, rank, rank, 2);
    for (int rank = 0; rank < 2; ++rank) {
      EXPECT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_READY, generation));
    }
    coordinator_->SendPeers(generation, nonce);
    return nonce;
  }
  bool LogHolds(int64_t generation, int rank, const std::string& text) {
    return Eventually([&] {
      const absl::StatusOr<LogPiece> log = ReadRankLog(RankDir(generation, rank), 0, 1 << 20);
      return log.ok() && absl::StrContains(log->data, text);
    });
  }
  v1::RankReport Report(int rank, int64_t generation = 1) {
    v1::RankReport report;
    coordinator_->WaitUntil([&] {
      report = coordinator_->ranks[{generation, rank}];
      return true;
    });
    return report;
  }

  std::string root_;
  std::unique_ptr<FakeCoordinator> coordinator_;
  std::unique_ptr<WorkerProcess> worker_;
  std::vector<std::string> nonces_;
};

TEST_P(WorkerFault, AWholeLife) {
  StartTwo("train");
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_GONE));
    const v1::RankReport report = Report(rank);
    EXPECT_EQ(report.exit_code(), 0);
    EXPECT_FALSE(report.has_cause()) << report.cause().DebugString();
    EXPECT_EQ(report.plan_hash(), 77u);
    EXPECT_EQ(report.address(), absl::StrCat("address of ", rank));
    EXPECT_TRUE(LogHolds(1, rank, "step 3"));
  }
  EXPECT_EQ(coordinator_->progress[0].step(), 3);
  EXPECT_TRUE(Eventually([&] {
    std::ifstream file(RankDir(1, 1) + "/metrics.jsonl");
    int lines = 0;
    for (std::string line; std::getline(file, line);) {
      const absl::StatusOr<StepLine> read = ParseStepLine(line);
      if (!read.ok() || read->rank != 1 || read->report.step() != ++lines) return false;
    }
    return lines == 3;
  }));
  const v1::Hello& hello = coordinator_->hellos.front();
  EXPECT_EQ(hello.num_slots(), 2);
  EXPECT_EQ(hello.memory_per_rank_bytes(), 1 << 30);
  EXPECT_EQ(hello.containment(), GetParam() ? "cgroup2" : "subreaper");
  EXPECT_THAT(hello.metrics_address(), HasSubstr("127.0.0.1:"));
}

TEST_P(WorkerFault, ACrashTakesTheSiblingsAndNamesTheFirst) {
  const std::string nonce = StartTwo("hang");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  kill(ProcessesOf({nonce, 1}).at(0), SIGABRT);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  const v1::RankReport crashed = Report(1);
  EXPECT_EQ(crashed.signal(), SIGABRT);
  EXPECT_FALSE(crashed.signal_sent_by_worker());
  EXPECT_EQ(crashed.cause().kind(), v1::CAUSE_KIND_SIGNAL);
  EXPECT_THAT(crashed.cause().log_tail(), ElementsAre("rank 1 does hang", "ready"));
  EXPECT_THAT(crashed.cause().evidence(), HasSubstr("rank 0 is behind, at collective 100 of 101"));
  const v1::RankReport sibling = Report(0);
  EXPECT_EQ(sibling.signal(), SIGKILL);
  EXPECT_TRUE(sibling.signal_sent_by_worker());
  EXPECT_EQ(sibling.cause().kind(), v1::CAUSE_KIND_PEER_FAILURE);
}

TEST_P(WorkerFault, ExitCodeIsReported) {
  StartTwo("exit:7@0");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  EXPECT_EQ(Report(0).exit_code(), 7);
  EXPECT_EQ(Report(0).cause().kind(), v1::CAUSE_KIND_EXIT_CODE);
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
}

TEST_P(WorkerFault, AKilledTrainerIsASignalWeDidNotSend) {
  StartTwo("hang");
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_RUNNING));
  const std::vector<int> pids = ProcessesOf({nonces_[0], 1});
  ASSERT_EQ(pids.size(), 1u);
  kill(pids[0], SIGKILL);
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_FALSE(Report(1).signal_sent_by_worker());
  EXPECT_THAT(Report(1).cause().evidence(), HasSubstr("SIGKILL we did not send"));
  EXPECT_THAT(Scrape(coordinator_->hellos.front().metrics_address()),
              HasSubstr("upipe_rank_exits_total{node=\"n1\",outcome=\"failed\",worker=\"w1\"} 1"));
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
}

TEST_P(WorkerFault, OnNoticeTheGangLeavesTogether) {
  const std::string nonce = StartTwo("obey");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  coordinator_->Stop(1, nonce, 60000);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_GONE));
    EXPECT_TRUE(Report(rank).stopped_on_notice());
    EXPECT_EQ(Report(rank).exit_code(), 1);
    EXPECT_FALSE(Report(rank).has_cause()) << Report(rank).cause().DebugString();
  }
  EXPECT_EQ(Report(0).last_commit().step(), 10);
}

TEST_P(WorkerFault, BeforeTheFirstStepANoticeEndsAtOnce) {
  const std::string nonce = NewNonce();
  for (int rank = 0; rank < 2; ++rank) coordinator_->Start("obey", 1, nonce, rank, rank, 2);
  for (int rank = 0; rank < 2; ++rank)
    ASSERT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_READY));
  coordinator_->Stop(1, nonce, 60000);  // longer than the test waits
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_GONE));
    EXPECT_TRUE(Report(rank).signal_sent_by_worker());
    EXPECT_EQ(Report(rank).cause().kind(), v1::CAUSE_KIND_USER);
  }
}

TEST_P(WorkerFault, WhatDoesNotLeaveWithinTheGraceIsKilled) {
  const std::string nonce = StartTwo("obey@1");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  coordinator_->Stop(1, nonce, 300);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_EQ(Report(0).signal(), SIGKILL);
  EXPECT_TRUE(Report(0).signal_sent_by_worker());
  EXPECT_THAT(Report(0).cause().message(), HasSubstr("did not leave within the grace"));
  EXPECT_TRUE(Report(1).stopped_on_notice());
  coordinator_->Start("train", 1, NewNonce(), 0, 0, 2);  // the stopped generation may not come back
  ASSERT_TRUE(coordinator_->WaitUntil([&] {
    return absl::StrContains(coordinator_->ranks[{1, 0}].cause().message(),
                             "already ordered to stop");
  }));
}

TEST_P(WorkerFault, AStoppedRanksPositionIsReadAndItStaysInPlace) {
  const std::string nonce = StartTwo("hang");
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  const int pid = ProcessesOf({nonce, 1}).at(0);
  kill(pid, SIGSTOP);
  v1::RankPosition position;
  ASSERT_TRUE(coordinator_->WaitUntil([&] {
    position = coordinator_->positions[{1, 1}];
    return position.seconds_in_place() > 0.5;
  }));
  EXPECT_EQ(position.collective(), 101);
  EXPECT_TRUE(position.in_collective());
  EXPECT_EQ(position.changes(), 1u);
  coordinator_->Stop(1, nonce, 200);  // deaf to a notice
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_THAT(Report(1).cause().evidence(), HasSubstr("inside collective 101"));
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->positions.empty(); }));
}

TEST_P(WorkerFault, ResumeCommitProblemAndRetentionReachWhoTheyAreFor) {
  const std::string nonce = NewNonce();
  for (int rank = 0; rank < 2; ++rank) coordinator_->Start("checkpoint", 1, nonce, rank, rank, 2);
  for (int rank = 0; rank < 2; ++rank)
    ASSERT_TRUE(coordinator_->WaitForState(rank, v1::RANK_STATE_READY));
  EXPECT_EQ(Report(0).resume().step(), 40);
  EXPECT_FALSE(Report(1).has_resume());
  coordinator_->SendPeers(1, nonce, /*resume_step=*/30);
  EXPECT_TRUE(LogHolds(1, 0, "resumes step 30"));
  EXPECT_TRUE(LogHolds(1, 1, "resumes step 30"));
  ASSERT_TRUE(coordinator_->WaitUntil([&] {
    return coordinator_->ranks[{1, 0}].last_commit().step() == 45 &&
           coordinator_->ranks[{1, 0}].problems_size() == 2;
  }));
  EXPECT_EQ(Report(0).problems(0).step(), 50);
  EXPECT_EQ(Report(0).problems(1).message(), "no room on the checkpoints' disk");
  const std::string text = Scrape(coordinator_->hellos.front().metrics_address());
  const std::string slot = "{node=\"n1\",slot=\"0\",worker=\"w1\"} ";
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_checkpoints_total", slot, "1")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_checkpoint_problems_total", slot, "2")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_checkpoint_step", slot, "45")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_checkpoint_bytes", slot, "1048576")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_checkpoint_seconds", slot, "1.5")));
  coordinator_->Retain(1, nonce, 3);
  EXPECT_TRUE(LogHolds(1, 0, "keeps 3"));
}

TEST_P(WorkerFault, AKillForWantOfMemoryIsShownAsSuch) {
  const V1Cgroup memory("memory");
  if (!memory.made() || !memory.Set("memory.limit_in_bytes", "268435456"))
    GTEST_SKIP() << "no v1 memory cgroup can be made here";
  memory.Set("memory.memsw.limit_in_bytes", "268435456");  // where swap is counted
  ASSERT_TRUE(memory.Set("cgroup.procs", absl::StrCat(worker_->pid())));
  StartTwo("eat-memory@1");
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  EXPECT_EQ(Report(1).signal(), SIGKILL);
  EXPECT_FALSE(Report(1).signal_sent_by_worker());
  EXPECT_EQ(Report(1).cause().kind(), v1::CAUSE_KIND_OUT_OF_MEMORY) << Report(1).DebugString();
  EXPECT_THAT(Report(1).cause().evidence(),
              ::testing::AnyOf(HasSubstr("oom_kill +1"), HasSubstr("kernel log: ")));
  EXPECT_EQ(Report(0).cause().kind(), v1::CAUSE_KIND_PEER_FAILURE);
  worker_.reset();  // lives in it
}

// A frozen process takes no SIGKILL until it is thawed, as one that waits for a dead disk.
TEST_P(WorkerFault, ASlotIsQuarantinedUntilItsRankIsProvenGone) {
  const V1Cgroup freezer("freezer");
  if (!freezer.made()) GTEST_SKIP() << "no v1 freezer cgroup can be made here";
  const std::string nonce = StartTwo("hang");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  ASSERT_TRUE(freezer.Set("cgroup.procs", absl::StrCat(ProcessesOf({nonce, 0}).at(0))));
  ASSERT_TRUE(freezer.Set("freezer.state", "FROZEN"));
  ASSERT_TRUE(Eventually([&] { return freezer.Get("freezer.state") == "FROZEN"; }));
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->ranks[{1, 0}].quarantined(); }));
  EXPECT_NE(Report(0).state(), v1::RANK_STATE_GONE);
  const std::string next = NewNonce();
  coordinator_->Start("train", 2, next, 0, 0, 2);  // waits for the slot
  EXPECT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_PLACED, 2));
  EXPECT_THAT(ProcessesOf({next, 0}), ElementsAre());
  EXPECT_TRUE(freezer.Set("freezer.state", "THAWED"));
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  EXPECT_FALSE(Report(0).quarantined());
  EXPECT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_READY, 2));
}

TEST_P(WorkerFault, AWorkerThatDiesAtAnyPointOfARanksLifeLeavesNothing) {
  size_t hellos = 1;
  int64_t generation = 0;
  for (const char* point :
       {"worker.journaled", "worker.forked", "worker.reaped", "worker.proven"}) {
    worker_.reset();
    setenv("UPIPE_FAILPOINT", absl::StrCat(point, ":kill").c_str(), 1);
    StartWorker();
    unsetenv("UPIPE_FAILPOINT");
    ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->hellos.size() > hellos; }));
    const std::string nonce = NewNonce();
    coordinator_->Start("hang", ++generation, nonce, 0, 0, 2);
    if (absl::StrContains(point, "reaped") || absl::StrContains(point, "proven")) {
      ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_READY, generation));
      coordinator_->Stop(generation, nonce, 0);
    }
    const int status = worker_->Wait();
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << point << " " << status;
    StartWorker();
    ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->hellos.size() > hellos + 1; }));
    EXPECT_THAT(Processes(), ElementsAre()) << point;
    EXPECT_EQ(coordinator_->hellos.back().ranks_size(), 0);
    hellos = coordinator_->hellos.size();
  }
}

TEST_P(WorkerFault, AnEscapedGrandchildDiesWithItsRank) {
  const std::string nonce = StartTwo("grandchild@0");
  ASSERT_TRUE(LogHolds(1, 0, "grandchild "));
  EXPECT_TRUE(Eventually([&] { return ProcessesOf({nonce, 0}).size() == 2; }));
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  EXPECT_THAT(ProcessesOf({nonce, 0}), ElementsAre());
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
}

TEST_P(WorkerFault, WithoutACoordinatorTheRanksDieAfterTheAutonomyAndTheResultsAreKept) {
  StartTwo("hang");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_RUNNING));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_RUNNING));
  const std::string address = coordinator_->address();
  const BootTime left = SystemClock().Now();
  coordinator_.reset();
  EXPECT_EQ(Processes().size(), 2u);
  ASSERT_TRUE(Eventually([&] { return Processes().empty(); }));
  const absl::Duration lived = SystemClock().Now() - left;
  EXPECT_GE(lived,
            absl::Milliseconds(2700));  // A = 3 s since the last acknowledged heartbeat, H = 0.2 s
  EXPECT_LE(lived, absl::Milliseconds(6030));  // E = 1.01 A + K + M, with K = 2 s and M = 1 s
  coordinator_ = std::make_unique<FakeCoordinator>(address);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_EQ(coordinator_->hellos.front().ranks_size(), 2);
  EXPECT_EQ(coordinator_->hellos.front().ranks(0).state(), v1::RANK_STATE_GONE);
  EXPECT_EQ(Report(0).cause().kind(), v1::CAUSE_KIND_NODE_LOST);
}

TEST_P(WorkerFault, ABriefAbsenceChangesNothing) {
  const std::string nonce = StartTwo("hang");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_RUNNING));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_RUNNING));
  const std::string address = coordinator_->address();
  coordinator_.reset();
  coordinator_ = std::make_unique<FakeCoordinator>(address);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return !coordinator_->hellos.empty(); }));
  EXPECT_EQ(coordinator_->hellos.front().ranks_size(), 2);
  EXPECT_EQ(coordinator_->hellos.front().ranks(1).state(), v1::RANK_STATE_RUNNING);
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
}

TEST_P(WorkerFault, AKilledWorkerLeavesNoTrainerAndTheNextOneKillsTheRestBeforeHello) {
  const std::string nonce = StartTwo("grandchild@0");
  ASSERT_TRUE(LogHolds(1, 0, "grandchild "));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  ASSERT_TRUE(Eventually([&] { return Processes().size() == 3; }));  // the middle child has left
  worker_->End(SIGKILL);
  // The trainers die with their worker; the escaped grandchild does not.
  ASSERT_TRUE(Eventually([&] { return Processes().size() <= 1; }));
  EXPECT_EQ(ProcessesOf({nonce, 0}).size(), 1u);
  size_t left_at_hello = 99;
  StartWorker();
  ASSERT_TRUE(coordinator_->WaitUntil([&] {
    if (coordinator_->hellos.size() < 2) return false;
    left_at_hello = Processes().size();
    return true;
  }));
  EXPECT_EQ(left_at_hello, 0u);
  EXPECT_EQ(coordinator_->hellos[1].ranks_size(), 0);
  EXPECT_NE(coordinator_->hellos[1].incarnation(), coordinator_->hellos[0].incarnation());
}

TEST_P(WorkerFault, AKilledWorkersGenerationsAreRemembered) {
  StartTwo("hang", 5);
  ASSERT_TRUE(LogHolds(5, 0, "ready"));
  worker_->End(SIGKILL);
  StartWorker();
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->hellos.size() == 2; }));
  EXPECT_EQ(coordinator_->hellos[1].newest_generations().at("job-1"), 5);
  coordinator_->OpenLog("earlier", 5, 0, 7, false);  // from an offset, past the worker's death
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs_ended["earlier"]; }));
  EXPECT_THAT(coordinator_->logs["earlier"], ::testing::StartsWith("does hang\n"));
  coordinator_->Start("train", 4, NewNonce(), 0, 0, 2);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE, 4));
  EXPECT_THAT(Report(0, 4).cause().message(), HasSubstr("lower than 5"));
}

TEST_P(WorkerFault, StartsAreIdempotentAndFenced) {
  const std::string nonce = StartTwo("hang", 2);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_RUNNING, 2));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_RUNNING, 2));
  coordinator_->Start("hang", 2, nonce, 0, 0, 2);  // the same again: reported, not started
  coordinator_->Start("hang", 1, NewNonce(), 0, 0, 2);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE, 1));
  EXPECT_THAT(Report(0, 1).cause().message(), HasSubstr("lower than 2"));
  EXPECT_EQ(ProcessesOf({nonce, 0}).size(), 1u);

  // A higher generation replaces both, each slot only after its proof.
  const std::string next = NewNonce();
  coordinator_->Start("train", 3, next, 0, 0, 2);
  coordinator_->Start("train", 3, next, 1, 1, 2);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_READY, 3));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_READY, 3));
  EXPECT_THAT(ProcessesOf({nonce, 0}), ElementsAre());
  EXPECT_THAT(ProcessesOf({nonce, 1}), ElementsAre());
  EXPECT_EQ(Report(0, 2).state(), v1::RANK_STATE_GONE);
  coordinator_->SendPeers(3, next);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE, 3));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE, 3));
  EXPECT_EQ(Report(0, 3).exit_code(), 0);
}

TEST_P(WorkerFault, ResultsAreRepeatedUntilAcknowledged) {
  coordinator_->set_acknowledge_ranks(false);
  StartTwo("train");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  const std::string address = coordinator_->address();
  coordinator_.reset();
  coordinator_ = std::make_unique<FakeCoordinator>(address);
  ASSERT_TRUE(
      coordinator_->WaitForState(0, v1::RANK_STATE_GONE));  // heard again, and acknowledged now
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_EQ(Report(0).exit_code(), 0);
  coordinator_.reset();
  coordinator_ = std::make_unique<FakeCoordinator>(address);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return !coordinator_->hellos.empty(); }));
  EXPECT_EQ(coordinator_->hellos.front().ranks_size(), 0);
}

TEST_P(WorkerFault, LogsAreUploadedAndFollowed) {
  const std::string nonce = StartTwo("hang");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  coordinator_->OpenLog("whole", 1, 0, 0, false);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs_ended["whole"]; }));
  EXPECT_EQ(coordinator_->logs["whole"], "rank 0 does hang\nready\n");
  EXPECT_TRUE(coordinator_->logs_complete["whole"]);
  coordinator_->OpenLog("tail", 1, 0, -6, true);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs["tail"] == "ready\n"; }));
  EXPECT_FALSE(coordinator_->logs_ended["tail"]);
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs_ended["tail"]; }));
  EXPECT_TRUE(coordinator_->logs_complete["tail"]);
  coordinator_->OpenLog("missing", 9, 0, 0, false);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs_ended["missing"]; }));
  EXPECT_THAT(coordinator_->logs["missing"], HasSubstr("holds no log"));
  EXPECT_FALSE(coordinator_->logs_complete["missing"]);
}

// Of an attempt that has ended: the steps, then no timeline, which this trainer does not tell.
TEST_P(WorkerFault, FilesOfARankAreUploaded) {
  StartTwo("train");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  ASSERT_TRUE(Eventually([&] {
    std::ifstream file(RankDir(1, 1) + "/metrics.jsonl");
    return std::count(std::istreambuf_iterator<char>(file), {}, '\n') == 3;
  }));
  const auto read = [&](const std::string& id, v1::RankFile file) {
    coordinator_->OpenLog(id, 1, 1, 0, false, file);
    EXPECT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->logs_ended[id]; }));
    return coordinator_->logs[id];
  };
  const std::string steps = read("steps", v1::RANK_FILE_STEPS);
  EXPECT_TRUE(coordinator_->logs_complete["steps"]);
  std::vector<int64_t> numbers;
  for (const absl::string_view line : absl::StrSplit(steps, '\n', absl::SkipEmpty())) {
    const absl::StatusOr<StepLine> step = ParseStepLine(line);
    ASSERT_TRUE(step.ok()) << line;
    EXPECT_EQ(step->rank, 1);
    numbers.push_back(step->report.step());
  }
  EXPECT_THAT(numbers, ElementsAre(1, 2, 3));
  EXPECT_EQ(read("log", v1::RANK_FILE_LOG), "step 1\nstep 2\nstep 3\n");
  std::ofstream(RankDir(1, 1) + "/timeline.jsonl") << "a timeline\n";
  EXPECT_EQ(read("timelines", v1::RANK_FILE_TIMELINES), "a timeline\n");
  std::filesystem::remove(RankDir(1, 1) + "/timeline.jsonl");
  EXPECT_THAT(read("none", v1::RANK_FILE_TIMELINES), HasSubstr("holds no timeline"));
  EXPECT_FALSE(coordinator_->logs_complete["none"]);
  EXPECT_THAT(read("unknown", static_cast<v1::RankFile>(77)), HasSubstr("no file of kind 77"));
}

TEST_P(WorkerFault, SigtermLeavesOnceTheCoordinatorHasStoppedTheRanks) {
  const std::string nonce = StartTwo("obey");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  worker_->Signal(SIGTERM);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->leaving; }));
  coordinator_->Start("train", 2, NewNonce(), 0, 0, 2);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE, 2));
  EXPECT_THAT(Report(0, 2).cause().message(), HasSubstr("the worker is leaving"));
  EXPECT_EQ(Processes().size(), 2u);
  coordinator_->Stop(1, nonce, 60000);
  const int status = worker_->Wait();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Report(rank).state(), v1::RANK_STATE_GONE);
    EXPECT_TRUE(Report(rank).stopped_on_notice());
  }
}

TEST_P(WorkerFault, SigtermWithoutACoordinatorAsksTheRanksItself) {
  StartTwo("obey");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  ASSERT_TRUE(LogHolds(1, 1, "ready"));
  coordinator_.reset();
  const int status = worker_->End(SIGTERM);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_TRUE(LogHolds(1, 0, "leaves on notice"));
  EXPECT_TRUE(LogHolds(1, 1, "leaves on notice"));
}

TEST_P(WorkerFault, ASecondSignalKillsProvesAndLeaves) {
  StartTwo("grandchild");
  ASSERT_TRUE(LogHolds(1, 0, "grandchild "));
  ASSERT_TRUE(LogHolds(1, 1, "grandchild"));
  worker_->Signal(SIGTERM);
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->leaving; }));
  const int status = worker_->End(SIGTERM);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_THAT(Processes(), ElementsAre());
  EXPECT_EQ(Report(0).state(), v1::RANK_STATE_GONE);
  EXPECT_TRUE(Report(0).signal_sent_by_worker());
}

TEST_P(WorkerFault, WhatDoesNotLeaveWithItsWorkerIsKilledAtTheBound) {
  worker_.reset();
  StartWorker("300ms");
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->hellos.size() == 2; }));
  StartTwo("hang");
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_RUNNING));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_RUNNING));
  const int status = worker_->End(SIGTERM);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_THAT(Processes(), ElementsAre());
  EXPECT_THAT(Report(0).cause().message(), HasSubstr("did not leave within 300ms"));
}

TEST_P(WorkerFault, SharedMemoryGoesWithTheRank) {
  const std::string nonce = StartTwo("shared-memory@0");
  ASSERT_TRUE(LogHolds(1, 0, "ready"));
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  const std::string log = ReadRankLog(RankDir(1, 0), 0, 4096)->data;
  const std::string segment = log.substr(
      log.find("segment ") + 8, log.find('\n', log.find("segment ")) - log.find("segment ") - 8);
  std::ifstream table("/proc/sysvipc/shm");
  std::stringstream rows;
  rows << table.rdbuf();
  EXPECT_FALSE(absl::StrContains(rows.str(), absl::StrCat(" ", segment, " "))) << segment;
}

TEST_P(WorkerFault, MetricsFollowTheAttemptThatHoldsTheSlot) {
  const std::string nonce = StartTwo("report");
  ASSERT_TRUE(coordinator_->WaitUntil([&] { return coordinator_->progress[1].step() == 3; }));
  const std::string address = coordinator_->hellos.front().metrics_address();
  const std::string slot = "node=\"n1\",slot=\"1\"";
  const std::string device_slot = "node=\"n1\",pool=\"device\",slot=\"1\"";
  const std::string host_slot = "node=\"n1\",pool=\"host\",slot=\"1\"";
  std::string text;
  ASSERT_TRUE(Eventually([&] {
    text = Scrape(address);
    return absl::StrContains(text, absl::StrCat("upipe_steps_total{", slot, ",worker=\"w1\"} 3"));
  })) << text;
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_memory_bytes{", device_slot,
                                           ",tag=\"weights\",worker=\"w1\"} 1024")));
  EXPECT_THAT(text, HasSubstr(absl::StrCat("upipe_memory_tag_peak_bytes{", device_slot,
                                           ",tag=\"attn_q\",worker=\"w1\"} 512")));
  EXPECT_THAT(
      text, HasSubstr(absl::StrCat("upipe_memory_peak_bytes{", host_slot, ",worker=\"w1\"} 4096")));
  EXPECT_THAT(text,
              HasSubstr(absl::StrCat("upipe_attention_peak_bytes{", slot, ",worker=\"w1\"} 768")));
  EXPECT_THAT(text,
              HasSubstr(absl::StrCat("upipe_step_own_seconds{", slot, ",worker=\"w1\"} 0.75")));
  EXPECT_TRUE(Eventually([&] {
    return absl::StrContains(Scrape(address), absl::StrCat("upipe_rank_in_place_seconds{", slot));
  }));
  EXPECT_THAT(text, HasSubstr("upipe_comm_seconds_total{node=\"n1\",operation=\"all_to_all\","
                              "slot=\"1\",worker=\"w1\"} 0.75"));
  EXPECT_THAT(text, HasSubstr("upipe_slots{node=\"n1\",state=\"taken\",worker=\"w1\"} 2"));
  EXPECT_THAT(text, HasSubstr("upipe_worker_connected{node=\"n1\",worker=\"w1\"} 1"));
  EXPECT_THAT(text, ::testing::ContainsRegex("upipe_attempt_info\\{generation=\"1\",job=\"job-1\","
                                             "node=\"n1\",plan=\"[0-9a-f]{16}\",rank=\"1\""));
  coordinator_->Stop(1, nonce, 0);
  ASSERT_TRUE(coordinator_->WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_->WaitForState(1, v1::RANK_STATE_GONE));
  text = Scrape(address);
  EXPECT_THAT(text, ::testing::Not(HasSubstr("upipe_attempt_info{")));
  EXPECT_THAT(text, ::testing::Not(HasSubstr("upipe_loss{")));
  EXPECT_THAT(text, HasSubstr("upipe_steps_total{"));
  EXPECT_THAT(text,
              HasSubstr("upipe_rank_exits_total{node=\"n1\",outcome=\"killed\",worker=\"w1\"} 2"));
  EXPECT_THAT(text, HasSubstr("outcome=\"failed\",worker=\"w1\"} 0"));
}

INSTANTIATE_TEST_SUITE_P(Containment, WorkerFault, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cgroup2" : "Subreaper"; });

}  // namespace
}  // namespace upipe::worker
