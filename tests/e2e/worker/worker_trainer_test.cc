// Two real trainers under a real worker: they meet over UCX, train, stop at a step boundary, and
// leave no shared memory however they end.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/cpu_placement.h"
#include "common/ids.h"
#include "common/spec/yaml_spec.h"
#include "engine/data/pack.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "planner/plan.h"
#include "tests/fault/worker/fake_coordinator.h"
#include "tests/fault/worker/worker_process.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string SegmentsTable() {
  std::ifstream table("/proc/sysvipc/shm");
  std::stringstream text;
  text << table.rdbuf();
  return text.str();
}

// System V segments whose creator was one of `pids`.
int SegmentsOf(const std::vector<int>& pids) {
  std::istringstream table(SegmentsTable());
  std::string line;
  int num = 0;
  std::getline(table, line);
  while (std::getline(table, line)) {
    std::istringstream row(line);
    int64_t key, id, permissions, size;
    int creator = 0;
    row >> key >> id >> permissions >> size >> creator;
    num += static_cast<int>(std::count(pids.begin(), pids.end(), creator));
  }
  return num;
}

class WorkerTrainer : public ::testing::Test {
 protected:
  WorkerTrainer() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "worker-trainer-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    std::filesystem::create_directories(root_ + "/state");
    std::ofstream text(root_ + "/text");
    for (int i = 0; i < 4000; ++i) text << "line " << i << " of a text to train on\n";
    text.close();
    const auto packed = data::Pack({.inputs = {root_ + "/text"}, .output = root_ + "/data"});
    EXPECT_TRUE(packed.ok()) << packed.status();
    StartWorker();
    EXPECT_TRUE(coordinator_.WaitUntil([&] { return !coordinator_.hellos.empty(); }));
  }
  ~WorkerTrainer() override {
    worker_.reset();
    for (int rank = 0; rank < 2; ++rank) EXPECT_THAT(ProcessesOf({nonce_, rank}), IsEmpty());
    EXPECT_EQ(SegmentsOf(pids_), 0) << SegmentsTable();
    if (HasFailure()) {
      std::stringstream text;
      for (const char* file :
           {"/worker.log", "/state/ranks/job-1/g1/r0/log.00000000000000000000"}) {
        text << file << "\n" << std::ifstream(root_ + file).rdbuf() << "\n";
      }
      std::cerr << text.str();
    }
    std::filesystem::remove_all(root_);
  }
  void StartWorker(bool place = true) {
    worker_ = std::make_unique<WorkerProcess>(
        WorkerProcess::Options{coordinator_.address(), root_, TRAINER_BINARY, true, place});
  }
  // What the rank's log says of its CPUs: a list, or "any: why".
  std::string LoggedCpus(int rank) const {
    const auto log = ReadRankLog(absl::StrCat(root_, "/state/ranks/job-1/g1/r", rank), 0, 1 << 20);
    if (!log.ok()) return log.status().ToString();
    const size_t begin = log->data.find(", cpus ");
    if (begin == std::string::npos) return "";
    return log->data.substr(begin + 7, log->data.find('\n', begin) - begin - 7);
  }
  v1::RunPlan Plan(int steps) {
    const std::string yaml = absl::StrCat(
        "name: two\n"
        "model: {vocab_size: 257, hidden_size: 32, num_layers: 2, num_heads: 8, num_kv_heads: 2, "
        "head_dim: 8, "
        "intermediate_size: 48}\n"
        "data: {path: ",
        root_,
        "/data}\n"
        "parallel: {ranks: 2, method: upipe, heads_per_stage: 2}\n"
        "train: {context: 256, steps: ",
        steps, "}\n");
    const absl::StatusOr<v1::JobSpec> spec = ParseJobSpecYaml(yaml, "test", {});
    EXPECT_TRUE(spec.ok()) << spec.status();
    const absl::StatusOr<v1::RunPlan> plan = planner::MakeRunPlan(*spec, {});
    EXPECT_TRUE(plan.ok()) << plan.status();
    return *plan;
  }
  void StartTwo(const v1::RunPlan& plan) {
    for (int rank = 0; rank < 2; ++rank) coordinator_.Start(plan, 1, nonce_, rank, rank);
    for (int rank = 0; rank < 2; ++rank)
      ASSERT_TRUE(coordinator_.WaitForState(rank, v1::RANK_STATE_READY));
    for (int rank = 0; rank < 2; ++rank) {
      for (const int pid : ProcessesOf({nonce_, rank})) pids_.push_back(pid);
    }
    coordinator_.SendPeers(1, nonce_);
  }
  void WaitForSteps(int64_t steps) {
    ASSERT_TRUE(coordinator_.WaitUntil([&] {
      return coordinator_.progress[0].step() >= steps && coordinator_.progress[1].step() >= steps;
    }));
  }
  v1::RankReport Report(int rank) {
    v1::RankReport report;
    coordinator_.WaitUntil([&] {
      report = coordinator_.ranks[{1, rank}];
      return true;
    });
    return report;
  }

  std::string root_;
  FakeCoordinator coordinator_;
  std::unique_ptr<WorkerProcess> worker_;
  const std::string nonce_ = RandomNonce();
  std::vector<int> pids_;
};

TEST_F(WorkerTrainer, TrainsToTheEndWithinThePlannedBytes) {
  const v1::RunPlan plan = Plan(3);
  StartTwo(plan);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_.WaitForState(rank, v1::RANK_STATE_GONE));
    EXPECT_EQ(Report(rank).exit_code(), 0);
    EXPECT_FALSE(Report(rank).has_cause()) << Report(rank).cause().DebugString();
    EXPECT_EQ(Report(rank).plan_hash(), plan.plan_hash());
  }
  WaitForSteps(3);
  EXPECT_TRUE(std::isfinite(coordinator_.progress[0].loss()));
  EXPECT_EQ(coordinator_.progress[0].loss(), coordinator_.progress[1].loss());
  EXPECT_EQ(coordinator_.progress[0].memory().peak_bytes(), plan.ranks(0).memory().peak_bytes());
}

// Cpus_allowed_list of every thread of a process.
std::set<std::string> AllowedOf(int pid) {
  std::set<std::string> lists;
  std::error_code error;
  for (const auto& task :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/task"), error)) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      const std::string name = "Cpus_allowed_list:\t";
      if (line.rfind(name, 0) == 0) lists.insert(line.substr(name.size()));
    }
  }
  return lists;
}

TEST_F(WorkerTrainer, EveryThreadOfARankIsOnTheRanksOwnCpus) {
  const absl::StatusOr<std::vector<int>> allowed = AllowedCpus();
  ASSERT_TRUE(allowed.ok()) << allowed.status();
  if (allowed->size() < 2) GTEST_SKIP() << "two ranks and " << allowed->size() << " CPU";
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  ASSERT_EQ(pids_.size(), 2u);
  for (int rank = 0; rank < 2; ++rank) {
    if (LoggedCpus(rank).find("other ranks hold") != std::string::npos) {
      GTEST_SKIP() << "programs outside this test hold the machine's CPUs: " << LoggedCpus(rank);
    }
    EXPECT_THAT(AllowedOf(pids_[rank]), testing::ElementsAre(LoggedCpus(rank))) << "rank " << rank;
  }
  EXPECT_NE(LoggedCpus(0), LoggedCpus(1));
  std::stringstream configuration;
  configuration << std::ifstream(root_ + "/worker.log").rdbuf();
  EXPECT_THAT(configuration.str(), HasSubstr("cpu_placement = each rank its own"));
  EXPECT_THAT(configuration.str(), HasSubstr("cpus = " + FormatCpuList(*allowed) + " ("));
}

TEST_F(WorkerTrainer, ToldSoItsThreadsRunAnywhere) {
  worker_.reset();
  StartWorker(/*place=*/false);
  ASSERT_TRUE(coordinator_.WaitUntil([&] { return coordinator_.hellos.size() == 2; }));
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  const absl::StatusOr<std::vector<int>> allowed = AllowedCpus();
  ASSERT_TRUE(allowed.ok()) << allowed.status();
  EXPECT_EQ(LoggedCpus(0), "any: the worker was told --no-cpu-placement");
  EXPECT_THAT(AllowedOf(pids_.at(0)), testing::ElementsAre(FormatCpuList(*allowed)));
}

TEST_F(WorkerTrainer, AKilledTrainerEndsTheOtherAndLeavesNoSharedMemory) {
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  ASSERT_EQ(pids_.size(), 2u);
  kill(pids_[1], SIGKILL);
  ASSERT_TRUE(coordinator_.WaitForState(0, v1::RANK_STATE_GONE));
  ASSERT_TRUE(coordinator_.WaitForState(1, v1::RANK_STATE_GONE));
  EXPECT_FALSE(Report(1).signal_sent_by_worker());
  EXPECT_THAT(Report(1).cause().evidence(), HasSubstr("SIGKILL we did not send"));
  EXPECT_THAT(Report(1).cause().evidence(), HasSubstr("collective"));
  EXPECT_EQ(SegmentsOf(pids_), 0);
}

TEST_F(WorkerTrainer, AStopWithGraceEndsAtAStepBoundary) {
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  coordinator_.Stop(1, nonce_, 10000);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_.WaitForState(rank, v1::RANK_STATE_GONE));
    EXPECT_EQ(Report(rank).exit_code(), 1);
    EXPECT_TRUE(Report(rank).stopped_on_notice());
    EXPECT_FALSE(Report(rank).has_cause()) << Report(rank).cause().DebugString();
  }
}

// A stopped worker neither hears its coordinator nor kills: the trainers hold the deadline alone.
TEST_F(WorkerTrainer, TrainersOfAStoppedWorkerLeaveAtTheDeadline) {
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  kill(worker_->pid(), SIGSTOP);
  const BootTime stopped = SystemClock().Now();
  EXPECT_EQ(ProcessesOf({nonce_, 0}).size(), 1u);
  EXPECT_TRUE(Eventually([&] {
    return ProcessesOf({nonce_, 0}).empty() && ProcessesOf({nonce_, 1}).empty();
  }));
  EXPECT_GE(SystemClock().Now() - stopped, absl::Milliseconds(2500));  // A = 3 s, H = 0.2 s
  kill(worker_->pid(), SIGCONT);
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_TRUE(coordinator_.WaitForState(rank, v1::RANK_STATE_GONE));
    EXPECT_EQ(Report(rank).exit_code(), 1);
    EXPECT_EQ(Report(rank).cause().kind(), v1::CAUSE_KIND_NODE_LOST);  // the worker's own deadline
    const auto log = ReadRankLog(absl::StrCat(root_, "/state/ranks/job-1/g1/r", rank), 0, 1 << 20);
    ASSERT_TRUE(log.ok()) << log.status();
    EXPECT_THAT(log->data, HasSubstr("ABORTED: left: the worker's deadline"));
  }
}

TEST_F(WorkerTrainer, AKilledWorkerTakesItsTrainersWithIt) {
  StartTwo(Plan(1000000));
  WaitForSteps(2);
  worker_->End(SIGKILL);
  EXPECT_TRUE(Eventually([&] {
    return ProcessesOf({nonce_, 0}).empty() && ProcessesOf({nonce_, 1}).empty() &&
           SegmentsOf(pids_) == 0;
  }));
  StartWorker();  // removes the cgroups the dead one left
  EXPECT_TRUE(coordinator_.WaitUntil([&] { return coordinator_.hellos.size() == 2; }));
  if (const auto folder = FindWritableCgroup2(); folder.has_value()) {
    EXPECT_FALSE(std::filesystem::exists(absl::StrCat(*folder, "/upipe-", nonce_, "-0")));
  }
}

}  // namespace
}  // namespace upipe::worker
