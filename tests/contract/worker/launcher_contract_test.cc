// What every ProcessLauncher promises, held against real processes (both containments) and the
// fake.
#include <signal.h>

#include "gmock/gmock.h"
#include "tests/contract/worker/launcher_fixture.h"
#include "worker/launcher/cgroup.h"
#include "worker/launcher/fake_launcher.h"

namespace upipe::worker {
namespace {

enum class Kind { kFake, kSubreaper, kCgroup2 };

class LauncherContract : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam() == Kind::kCgroup2 && !FindWritableCgroup2().has_value())
      GTEST_SKIP() << "no writable cgroup2";
    dir_ = MakeTestFolder();
    const auto sink = [this](LaunchEvent event) { record_.Add(std::move(event)); };
    if (GetParam() == Kind::kFake) {
      auto fake = std::make_unique<FakeLauncher>(sink);
      fake_ = fake.get();
      launcher_ = std::move(fake);
      return;
    }
    auto posix = PosixLauncher::Create(
        {.state_dir = dir_, .allow_cgroup = GetParam() == Kind::kCgroup2}, recorder_, sink);
    ASSERT_TRUE(posix.ok()) << posix.status();
    launcher_ = *std::move(posix);
  }
  void TearDown() override {
    launcher_.reset();
    std::filesystem::remove_all(dir_);
  }
  // Started and past its first line of output.
  int Launch(const RankKey& key, const std::string& mode) {
    launcher_->Launch(FakeTrainerSpec(key, mode, dir_));
    Pump();
    const auto started = record_.Wait<TreeStarted>(key);
    if (!started.has_value()) return 0;
    if (fake_ == nullptr) {
      WaitForOutput(dir_, key.rank, "ready");
    } else {
      fake_->SetPosition(key, 42);
    }
    return started->pid;
  }
  void Pump() {
    while (fake_ != nullptr && fake_->Pump()) {
    }
  }
  void LetItExit(const RankKey& key, int pid, int code) {
    if (fake_ != nullptr) {
      fake_->Exit(key, {.exit_code = code});
    } else {
      kill(pid, SIGUSR1);
    }
    Pump();
  }

  std::string dir_;
  RankRecorder recorder_;
  EventRecord record_;
  FakeLauncher* fake_ = nullptr;
  std::unique_ptr<ProcessLauncher> launcher_;
  const RankKey key_{RandomNonce(), 0};
};

TEST_P(LauncherContract, AnExitCodeIsToldThenTheProof) {
  const int pid = Launch(key_, "exit-on-usr1:7");
  ASSERT_NE(pid, 0);
  LetItExit(key_, pid, 7);
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  const auto exited = record_.Wait<TreeExited>(key_);
  EXPECT_EQ(exited->exit.exit_code, 7);
  EXPECT_EQ(exited->exit.signal, std::nullopt);
  EXPECT_EQ(record_.Story(key_), "started exited gone");
}

TEST_P(LauncherContract, KillEndsBySigkillOnceHoweverOftenAsked) {
  ASSERT_NE(Launch(key_, "hang"), 0);
  launcher_->Kill(key_);
  launcher_->Kill(key_);
  Pump();
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_EQ(record_.Wait<TreeExited>(key_)->exit.signal, SIGKILL);
  launcher_->Kill(key_);
  Pump();
  EXPECT_EQ(record_.Story(key_), "started exited gone");
}

TEST_P(LauncherContract, WhatIsSupersededDies) {
  ASSERT_NE(Launch(key_, "hang"), 0);
  launcher_->KillSuperseded(key_, "job", 2);
  Pump();
  ASSERT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_EQ(record_.Wait<TreeExited>(key_)->exit.signal, SIGKILL);
}

TEST_P(LauncherContract, AFailedLaunchIsItsOwnProof) {
  LaunchSpec spec = FakeTrainerSpec(key_, "hang", dir_);
  spec.binary = dir_ + "/no-such-trainer";
  launcher_->Launch(spec);
  Pump();
  const auto failed = record_.Wait<TreeLaunchFailed>(key_);
  ASSERT_TRUE(failed.has_value());
  EXPECT_THAT(std::string(failed->status.message()), ::testing::HasSubstr("no-such-trainer"));
  EXPECT_EQ(record_.Story(key_), "failed");
}

TEST_P(LauncherContract, KillRightAfterLaunchLeavesNothingUntold) {
  launcher_->Launch(FakeTrainerSpec(key_, "hang", dir_));
  launcher_->Kill(key_);
  Pump();
  ASSERT_TRUE(record_.WaitForEnd(key_));
  EXPECT_THAT(record_.Story(key_), ::testing::AnyOf("failed", "started exited gone"));
}

TEST_P(LauncherContract, PositionsOfTheAttemptOnly) {
  const RankKey other{RandomNonce(), 1};
  ASSERT_NE(Launch(key_, "hang"), 0);
  ASSERT_NE(Launch(other, "hang"), 0);
  const std::vector<v1::RankPosition> positions = launcher_->ReadPositions(key_.nonce);
  ASSERT_EQ(positions.size(), 1u);
  EXPECT_EQ(positions[0].rank(), 0);
  EXPECT_EQ(positions[0].collective(), 42);
  EXPECT_EQ(positions[0].changes(), 1u);
  launcher_->Kill(key_);
  launcher_->Kill(other);
  Pump();
  EXPECT_TRUE(record_.Wait<TreeGone>(key_).has_value());
  EXPECT_TRUE(record_.Wait<TreeGone>(other).has_value());
}

TEST_P(LauncherContract, AnExitTellsThePositionsHoweverLateItIsRead) {
  const RankKey peer{key_.nonce, 1};
  const int pid = Launch(key_, "hang");
  ASSERT_NE(pid, 0);
  if (fake_ == nullptr) {
    kill(pid, SIGSTOP);
    EXPECT_EQ(launcher_->ReadPositions(key_.nonce).at(0).collective(), 42);
  }
  ASSERT_NE(Launch(peer, "hang"), 0);
  for (const RankKey& key : {key_, peer}) {
    launcher_->Kill(key);
    Pump();
    ASSERT_TRUE(record_.Wait<TreeGone>(key).has_value());
  }
  const auto first = record_.Wait<TreeExited>(key_);
  ASSERT_EQ(first->positions.size(), 2u);
  EXPECT_EQ(first->positions[0].collective(), 42);
  EXPECT_EQ(first->positions[1].rank(), 1);
  const auto last = record_.Wait<TreeExited>(peer);
  ASSERT_EQ(last->positions.size(), 1u);
  EXPECT_EQ(last->positions[0].collective(), 42);
  EXPECT_THAT(launcher_->ReadPositions(key_.nonce), ::testing::IsEmpty());
}

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  constexpr const char* kNames[] = {"Fake", "Subreaper", "Cgroup2"};
  return kNames[static_cast<size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Launchers, LauncherContract,
                         ::testing::Values(Kind::kFake, Kind::kSubreaper, Kind::kCgroup2),
                         KindName);

}  // namespace
}  // namespace upipe::worker
