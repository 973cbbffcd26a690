// What only real processes can show: escaped grandchildren, the worker's own death, leftovers,
// descriptors.
#include <signal.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "tests/contract/worker/launcher_fixture.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/proc_scan.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

bool WaitForProcesses(const RankKey& key, size_t num) {
  for (int i = 0; i < 3000; ++i) {
    if (ProcessesOf(key).size() == num) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

class PosixLauncherTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (GetParam() && !FindWritableCgroup2().has_value()) GTEST_SKIP() << "no writable cgroup2";
    dir_ = MakeTestFolder();
  }
  void TearDown() override {
    launcher_.reset();
    EXPECT_THAT(ProcessesOf(key_), IsEmpty());
    for (const int pid : ProcessesOf(key_))
      kill(pid, SIGKILL);  // a failed test leaves nothing either
    std::filesystem::remove_all(dir_);
  }
  void Create() {
    auto launcher =
        PosixLauncher::Create({.state_dir = dir_, .allow_cgroup = GetParam()}, recorder_,
                              [this](LaunchEvent event) { record_.Add(event); });
    ASSERT_TRUE(launcher.ok()) << launcher.status();
    launcher_ = *std::move(launcher);
  }

  std::string dir_;
  RankRecorder recorder_;
  EventRecord record_;
  std::unique_ptr<PosixLauncher> launcher_;
  const RankKey key_{RandomNonce(), 0};
};

TEST_P(PosixLauncherTest, AnEscapedGrandchildIsPartOfTheTree) {
  Create();
  launcher_->Launch(FakeTrainerSpec(key_, "grandchild", dir_));
  ASSERT_NE(WaitForOutput(dir_, 0, "grandchild "), "");
  ASSERT_TRUE(WaitForProcesses(key_, 2));
  launcher_->Kill(key_);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_THAT(ProcessesOf(key_), IsEmpty());
}

TEST_P(PosixLauncherTest, TheTreeDiesWithItsFirstProcess) {
  Create();
  launcher_->Launch(FakeTrainerSpec(key_, "grandchild", dir_));
  ASSERT_NE(WaitForOutput(dir_, 0, "grandchild "), "");
  ASSERT_NE(WaitForOutput(dir_, 0, "ready"), "");
  kill(record_.Wait<TreeStarted>(key_)->pid, SIGSEGV);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_THAT(ProcessesOf(key_), IsEmpty());
  EXPECT_EQ(record_.Wait<TreeExited>(key_)->exit.signal, SIGSEGV);
  EXPECT_THAT(record_.Wait<TreeExited>(key_)->exit.log_tail, ::testing::Contains("ready"));
}

// A peer's failure may have the worker kill a rank that another's SIGKILL ended a moment before.
TEST_P(PosixLauncherTest, TheFirstToKillIsKnown) {
  Create();
  launcher_->Launch(FakeTrainerSpec(key_, "grandchild", dir_));
  ASSERT_NE(WaitForOutput(dir_, 0, "ready"), "");
  kill(record_.Wait<TreeStarted>(key_)->pid, SIGKILL);
  launcher_->Kill(key_);
  EXPECT_TRUE(record_.Wait<TreeExited>(key_)->exit.died_before_kill);

  const RankKey second{key_.nonce, 1};
  launcher_->Launch(FakeTrainerSpec(second, "grandchild", dir_));
  ASSERT_NE(WaitForOutput(dir_, 1, "ready"), "");
  launcher_->Kill(second);
  EXPECT_FALSE(record_.Wait<TreeExited>(second)->exit.died_before_kill);
  ASSERT_TRUE(record_.Wait<TreeGone>(second).has_value());
}

TEST_P(PosixLauncherTest, SharedMemoryIsRemoved) {
  Create();
  launcher_->Launch(FakeTrainerSpec(key_, "shared-memory", dir_));
  const std::string output = WaitForOutput(dir_, 0, "ready");
  const std::string id = output.substr(8, output.find('\n') - 8);
  const auto exists = [&] {
    std::ifstream table("/proc/sysvipc/shm");
    std::stringstream rows;
    rows << table.rdbuf();
    return absl::StrContains(rows.str(), absl::StrCat(" ", id, " "));
  };
  EXPECT_TRUE(exists()) << output;
  EXPECT_TRUE(std::filesystem::exists("/dev/shm/upipe-test-" + key_.nonce));
  launcher_->Kill(key_);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_FALSE(exists());
  EXPECT_FALSE(std::filesystem::exists("/dev/shm/upipe-test-" + key_.nonce));
}

TEST_P(PosixLauncherTest, TheTrainerHoldsOnlyItsOwnDescriptors) {
  Create();
  int leaky[2];  // neither is close-on-exec
  ASSERT_EQ(pipe(leaky), 0);
  launcher_->Launch(FakeTrainerSpec(key_, "descriptors", dir_));
  EXPECT_EQ(WaitForOutput(dir_, 0, "ready"),
            "descriptor 0\ndescriptor 1\ndescriptor 2\ndescriptor 3\nready\n");
  close(leaky[0]);
  close(leaky[1]);
  const int pid = record_.Wait<TreeStarted>(key_)->pid;
  EXPECT_EQ(getsid(pid), pid);
  EXPECT_EQ(getpgid(pid), pid);
  std::ifstream score_file(absl::StrCat("/proc/", pid, "/oom_score_adj"));
  int score = 0;
  score_file >> score;
  EXPECT_EQ(score, 900);
  launcher_->Kill(key_);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
}

TEST_P(PosixLauncherTest, TheJournalIsWrittenBeforeTheForkAndClosedByTheProof) {
  Create();
  const auto journal = [&] {
    std::ifstream file(dir_ + "/journal");
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  };
  launcher_->Launch(FakeTrainerSpec(key_, "hang", dir_));
  ASSERT_TRUE(record_.Wait<TreeStarted>(key_).has_value());
  EXPECT_THAT(journal(), ::testing::HasSubstr(absl::StrCat("\nstart job 1 ", key_.nonce, " 0 ")));
  launcher_->Kill(key_);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_THAT(journal(), ::testing::HasSubstr(absl::StrCat("gone ", key_.nonce, " 0\n")));
}

TEST_P(PosixLauncherTest, ALaunchThatFailsBeforeTheForkLeavesNoCgroup) {
  Create();
  LaunchSpec spec = FakeTrainerSpec(key_, "hang", dir_);
  spec.log_dir = dir_ + "/journal/r0";  // below a file
  launcher_->Launch(spec);
  ASSERT_TRUE(record_.Wait<TreeLaunchFailed>(key_).has_value());
  if (!GetParam()) return;
  EXPECT_FALSE(
      std::filesystem::exists(absl::StrCat(*FindWritableCgroup2(), "/upipe-", key_.nonce, "-0")));
}

// A process of its own holds a launcher, as a worker does.
pid_t ForkHolder(const std::string& dir, bool cgroup, const RankKey& key) {
  const pid_t holder = fork();
  if (holder != 0) return holder;
  RankRecorder recorder;
  auto launcher = PosixLauncher::Create({.state_dir = dir, .allow_cgroup = cgroup}, recorder,
                                        [](LaunchEvent) {});
  if (!launcher.ok()) _exit(1);
  (*launcher)->Launch(FakeTrainerSpec(key, "grandchild", dir));
  for (;;) pause();
}

TEST_P(PosixLauncherTest, TrainersDieWithTheirWorkerAndTheNextOneKillsWhatEscaped) {
  const pid_t holder = ForkHolder(dir_, GetParam(), key_);
  ASSERT_NE(WaitForOutput(dir_, 0, "grandchild "), "");
  ASSERT_TRUE(WaitForProcesses(key_, 2));
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  ASSERT_TRUE(
      WaitForProcesses(key_, 1));  // by the parent death signal; the grandchild has no such parent
  Create();
  EXPECT_THAT(ProcessesOf(key_), IsEmpty());  // proven before Create returned
  EXPECT_EQ(launcher_->generations().at("job"), 1);
}

// A segment whose creator has ended; removed with the object.
class Segment {
 public:
  Segment() {
    int told[2];
    EXPECT_EQ(pipe(told), 0);
    creator_.pid = fork();
    if (creator_.pid == 0) {
      const int id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
      _exit(write(told[1], &id, sizeof id) == sizeof id ? 0 : 1);
    }
    EXPECT_EQ(read(told[0], &id_, sizeof id_), static_cast<ssize_t>(sizeof id_));
    creator_ = IdOf(creator_.pid);  // not yet reaped
    waitpid(creator_.pid, nullptr, 0);
    close(told[0]);
    close(told[1]);
  }
  ~Segment() { shmctl(id_, IPC_RMID, nullptr); }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  bool exists() const {
    shmid_ds info;
    return shmctl(id_, IPC_STAT, &info) == 0;
  }
  int id() const { return id_; }
  ProcessId creator() const { return creator_; }

 private:
  int id_ = -1;
  ProcessId creator_;
};

TEST(LeftoverSegments, AnAttachedOneStaysUnlessItsTreeIsOurs) {
  const Segment segment;
  EXPECT_GT(segment.creator().start_ticks, 0u);
  void* attached = shmat(segment.id(), nullptr, 0);
  EXPECT_FALSE(RemoveSystemVSegments({segment.creator()}, false));
  EXPECT_TRUE(segment.exists());
  shmdt(attached);
  EXPECT_TRUE(RemoveSystemVSegments({segment.creator()}, false));
  EXPECT_FALSE(segment.exists());
}

TEST(LeftoverSegments, AReusedPidIsAStranger) {
  const int id = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
  ProcessId earlier = IdOf(getpid());
  --earlier.start_ticks;
  EXPECT_TRUE(RemoveSystemVSegments({earlier}, true));
  EXPECT_EQ(shmctl(id, IPC_RMID, nullptr), 0);  // it was still there
}

TEST_P(PosixLauncherTest, TheJournalsPidsCountInTheirOwnBootOnly) {
  const Segment ours, strangers;
  const auto write_journal = [&](const Segment& segment, const std::string& boot) {
    std::ofstream(dir_ + "/journal")
        << "start job 1 " << key_.nonce << " 0 -\npid " << key_.nonce << " 0 "
        << segment.creator().pid << " " << segment.creator().start_ticks << " " << boot << "\n";
  };
  write_journal(strangers, "another-boot");
  Create();
  EXPECT_TRUE(strangers.exists());
  launcher_.reset();
  write_journal(ours, BootId());
  Create();
  EXPECT_FALSE(ours.exists());
}

INSTANTIATE_TEST_SUITE_P(Containment, PosixLauncherTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cgroup2" : "Subreaper"; });

}  // namespace
}  // namespace upipe::worker
