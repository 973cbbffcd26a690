#include "common/failpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <functional>
#include <set>
#include <string>

#include "tests/unit/data/temp_folder.h"

namespace upipe {
namespace {

using ::testing::HasSubstr;

class FailpointTest : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(ArmFailpoints(nullptr, nullptr).ok()); }
  // How a child that runs `body` ends.
  static int StatusOf(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      body();
      _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, WUNTRACED), child);
    if (WIFSTOPPED(status)) {
      kill(child, SIGKILL);
      int end = 0;
      waitpid(child, &end, 0);
    }
    return status;
  }
};

TEST_F(FailpointTest, NothingArmedDoesNothing) {
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
}

TEST_F(FailpointTest, FailsAtTheNthHitOfItsNameOnce) {
  ASSERT_TRUE(ArmFailpoints("trainer.step:enospc:3,trainer.ready:eio").ok());
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
  EXPECT_TRUE(Failpoint(failpoints::kTrainerConnected).ok());
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
  EXPECT_EQ(Failpoint(failpoints::kTrainerStep).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
  EXPECT_THAT(std::string(Failpoint(failpoints::kTrainerReady).message()),
              HasSubstr("trainer.ready"));
  ASSERT_TRUE(ArmFailpoints("").ok());
}

TEST_F(FailpointTest, EndsOrStopsTheProcess) {
  const auto hit = [](const char* text) {
    return StatusOf([text] {
      if (!ArmFailpoints(text).ok()) _exit(3);
      Failpoint(failpoints::kTrainerStep).IgnoreError();
    });
  };
  const int killed = hit("trainer.step:kill");
  EXPECT_TRUE(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGKILL);
  const int stopped = hit("trainer.step:stop");
  EXPECT_TRUE(WIFSTOPPED(stopped) && WSTOPSIG(stopped) == SIGSTOP);
  const int left = hit("trainer.step:exit");
  EXPECT_TRUE(WIFEXITED(left) && WEXITSTATUS(left) == 17);
  EXPECT_EQ(hit("trainer.step:kill:2"), 0);
}

TEST_F(FailpointTest, OneOfManyProcessesClaimsTheFile) {
  const data::TempFolder folder;
  ASSERT_TRUE(ArmFailpoints(nullptr, folder.Path("point").c_str()).ok());
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
  folder.Write("point", "trainer.step:kill");  // after the process has begun
  const auto step = [] { Failpoint(failpoints::kTrainerStep).IgnoreError(); };
  EXPECT_EQ(StatusOf([] { Failpoint(failpoints::kTrainerReady).IgnoreError(); }), 0);
  const int first = StatusOf(step);
  EXPECT_TRUE(WIFSIGNALED(first) && WTERMSIG(first) == SIGKILL);
  EXPECT_FALSE(std::filesystem::exists(folder.Path("point")));
  EXPECT_EQ(StatusOf(step), 0);
  folder.Write("point", "trainer.step:eio:2");
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
  EXPECT_FALSE(Failpoint(failpoints::kTrainerStep).ok());
  EXPECT_FALSE(std::filesystem::exists(folder.Path("point")));
}

TEST_F(FailpointTest, UnknownWordsAreRefused) {
  EXPECT_THAT(std::string(ArmFailpoints("trainer.stop:kill").message()),
              HasSubstr("trainer.connected"));
  EXPECT_THAT(std::string(ArmFailpoints("trainer.step:die").message()), HasSubstr("'die'"));
  EXPECT_THAT(std::string(ArmFailpoints("trainer.step:kill:0").message()), HasSubstr("'0'"));
  EXPECT_FALSE(ArmFailpoints("trainer.step", nullptr).ok());
  EXPECT_TRUE(Failpoint(failpoints::kTrainerStep).ok());
}

TEST_F(FailpointTest, EveryNameIsListedOnce) {
  const std::set<absl::string_view> names(std::begin(failpoints::kAll), std::end(failpoints::kAll));
  EXPECT_EQ(names.size(), std::size(failpoints::kAll));
}

}  // namespace
}  // namespace upipe
