// A checkpoint is whole or it is none: a process that is killed, or whose disk fails, between any
// two system calls leaves the one before or the one it was writing, and nothing in between.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/failpoint.h"
#include "common/status.h"
#include "engine/checkpoint/writer.h"
#include "tests/support/engine/checkpoint_files.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::checkpoint {
namespace {

using upipe::testing::TestFacts;
using upipe::testing::TestOwner;
using upipe::testing::TestState;
using upipe::testing::TestTensors;

constexpr int kRanks = 2;

// What a generation does: claims the folder, looks for the newest, writes step 2 and deletes
// step 1. The error of what failed first.
absl::Status WriteAndRetain(const std::string& root, int64_t generation) {
  UPIPE_ASSIGN_OR_RETURN(const JobFolder folder, JobFolder::Open(root, "job"));
  UPIPE_RETURN_IF_ERROR(folder.Claim(TestOwner(generation)));
  UPIPE_RETURN_IF_ERROR(folder.FindNewest(TestFacts()).status());
  const TestTensors tensors(2);
  std::vector<std::unique_ptr<Writer>> writers;
  absl::Status problem;
  v1::CheckpointRef committed;
  for (int rank = 0; rank < kRanks; ++rank) {
    writers.push_back(std::make_unique<Writer>(
        WriterOptions{.folder = folder,
                      .owner = TestOwner(generation),
                      .rank = rank,
                      .num_ranks = kRanks,
                      .facts = TestFacts(),
                      .patience = absl::Minutes(1),
                      .on_committed = [&](const v1::CheckpointRef& ref) { committed = ref; }}));
    writers.back()->Start(TestState(2), tensors.Pieces(rank, kRanks));
  }
  for (auto& writer : writers) writer->AwaitPart();
  int64_t failed = 0;
  for (auto& writer : writers) {
    failed = std::max(failed, writer->Hold().failed_step);
    if (problem.ok()) problem = writer->last_error();
  }
  for (auto& writer : writers) {
    if (failed > 0) writer->Abandon(failed);
    writer->Release();
  }
  for (auto& writer : writers) writer->AwaitIdle();
  if (problem.ok()) problem = writers[0]->last_error();
  if (committed.step() != 0) writers[0]->Retain(committed, 1);
  writers.clear();  // when that is done
  return problem;
}

class CheckpointCrashTest : public ::testing::Test {
 protected:
  void SetUp() override {
    before_ = upipe::testing::WriteTestCheckpoint(*JobFolder::Open(temp_.Path("seed"), "job"), 1, 1,
                                                  kRanks, 1);
    after_ = upipe::testing::WriteTestCheckpoint(*JobFolder::Open(temp_.Path("other"), "job"), 1, 2,
                                                 kRanks, 2);
  }
  void TearDown() override { ASSERT_TRUE(ArmFailpoints("").ok()); }

  std::string Fresh() const {
    const std::string root = temp_.Path("root");
    std::filesystem::remove_all(root);
    std::filesystem::copy(temp_.Path("seed"), root, std::filesystem::copy_options::recursive);
    return root;
  }
  // The newest is whole: what was there, or all of what was written.
  void ExpectWhole(const std::string& root) const {
    const auto folder = JobFolder::Open(root, "job");
    ASSERT_TRUE(folder.ok()) << folder.status();
    const auto choice = folder->FindNewest(TestFacts());
    ASSERT_TRUE(choice.ok()) << choice.status();
    ASSERT_TRUE(choice->newest.has_value());
    const auto& expected = choice->newest->step() == 1 ? before_ : after_;
    EXPECT_EQ(choice->newest->content_sha256(), expected.content_sha256());
    for (const v1::CheckpointProblem& problem : choice->passed_over) {
      EXPECT_THAT(problem.message(), ::testing::HasSubstr("it was not finished"));
    }
  }

  data::TempFolder temp_;
  v1::CheckpointRef before_, after_;
};

TEST_F(CheckpointCrashTest, KilledBeforeAnySystemCall) {
  int killed = 0;
  for (int hit = 1;; ++hit) {
    SCOPED_TRACE(absl::StrCat("system call ", hit));
    const std::string root = Fresh();
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      if (!ArmFailpoints(absl::StrCat("checkpoint.system_call:kill:", hit)).ok()) _exit(2);
      _exit(WriteAndRetain(root, 2).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ExpectWhole(root);
    if (HasFatalFailure()) return;
    // The next generation clears the rest and goes on.
    const absl::Status next = WriteAndRetain(root, 3);
    ASSERT_TRUE(next.ok()) << next;
    EXPECT_FALSE(std::filesystem::exists(root + "/job/g1"));
    EXPECT_FALSE(std::filesystem::exists(root + "/job/g2"));
    if (WIFEXITED(status)) {
      EXPECT_EQ(WEXITSTATUS(status), 0);
      break;
    }
    EXPECT_EQ(WTERMSIG(status), SIGKILL);
    ++killed;
  }
  EXPECT_GT(killed, 60);
}

TEST_F(CheckpointCrashTest, AnyOneSystemCallFails) {
  int failures = 0;
  for (int hit = 1;; ++hit) {
    const char* error = hit % 2 == 0 ? "eio" : "enospc";
    SCOPED_TRACE(absl::StrCat(error, " of system call ", hit));
    const std::string root = Fresh();
    ASSERT_TRUE(ArmFailpoints(absl::StrCat("checkpoint.system_call:", error, ":", hit)).ok());
    const absl::Status status = WriteAndRetain(root, 2);
    // Where it has not fired, as many hits again are enough.
    bool fired = true;
    for (int more = 0; more < hit && fired; ++more) {
      fired = Failpoint(failpoints::kCheckpointSystemCall).ok();
    }
    ASSERT_TRUE(ArmFailpoints("").ok());
    ExpectWhole(root);
    if (HasFatalFailure()) return;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
      EXPECT_NE(entry.path().extension(), ".tmp") << entry.path();
    }
    if (!status.ok()) ++failures;
    if (!fired) break;
  }
  EXPECT_GT(failures, 40);
}

}  // namespace
}  // namespace upipe::checkpoint
