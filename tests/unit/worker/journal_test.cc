#include "worker/launcher/journal.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::worker {
namespace {

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "journal-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
  }
  ~JournalTest() override { std::filesystem::remove_all(dir_); }
  void AppendRaw(const std::string& text) {
    std::ofstream(dir_ + "/journal", std::ios::app) << text;
  }
  std::string dir_;
};

TEST_F(JournalTest, KeepsWhatIsNotGone) {
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal.ok()) << journal.status();
    ASSERT_TRUE(journal->AppendStart({{"n1", 0}, "job", 3, "/cg/a"}).ok());
    ASSERT_TRUE(journal->AppendStart({{"n1", 1}, "job", 3, ""}).ok());
    ASSERT_TRUE(journal->AppendPid({"n1", 1}, {4711, 99}).ok());
    ASSERT_TRUE(journal->AppendGone({"n1", 0}).ok());
    ASSERT_TRUE(journal->AppendFence("other", 9).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ(journal->entries().size(), 1u);
  EXPECT_EQ(journal->entries()[0].key, (RankKey{"n1", 1}));
  EXPECT_EQ(journal->entries()[0].process, (ProcessId{4711, 99}));
  EXPECT_EQ(journal->entries()[0].boot, BootId());
  EXPECT_EQ(journal->generations().at("job"), 3);
  EXPECT_EQ(journal->generations().at("other"), 9);
}

TEST_F(JournalTest, CompactForgetsEntriesAndKeepsGenerations) {
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal->AppendStart({{"n1", 0}, "job", 3, "/cg/a"}).ok());
  }
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal->Compact().ok());
    ASSERT_TRUE(journal->AppendStart({{"n2", 0}, "job2", 1, ""}).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ(journal->entries().size(), 1u);
  EXPECT_EQ(journal->entries()[0].job, "job2");
  EXPECT_EQ(journal->generations().at("job"), 3);
}

TEST_F(JournalTest, ATornLastLineIsDroppedAndNothingIsGluedToIt) {
  AppendRaw("start job 1 n1 0 -\nstart job 1 n1");
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_EQ(journal->entries().size(), 1u);
    ASSERT_TRUE(journal->AppendStart({{"n1", 1}, "job", 1, ""}).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  EXPECT_EQ(journal->entries().size(), 2u);
}

TEST_F(JournalTest, GarbageIsDataLoss) {
  AppendRaw("start job one n1 0 -\n");
  EXPECT_EQ(Journal::Open(dir_).status().code(), absl::StatusCode::kDataLoss);
}

// A file size limit stands for the full disk: the write is cut short, then refused.
TEST_F(JournalTest, ALineTheDiskDoesNotTakeLeavesNoTraceAndLaterOnesFit) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal.ok());
    ASSERT_TRUE(journal->AppendStart({{"n1", 0}, "job", 1, ""}).ok());
    const auto bytes = std::filesystem::file_size(dir_ + "/journal");
    const rlimit full{bytes + 5, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
    const absl::Status refused = journal->AppendStart({{"n2", 0}, "job2", 1, ""});
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_FALSE(refused.ok());
    EXPECT_NE(refused.message().find("make room"), std::string::npos) << refused;
    EXPECT_EQ(std::filesystem::file_size(dir_ + "/journal"), bytes);
    EXPECT_TRUE(journal->AppendGone({"n1", 0}).ok());
    EXPECT_TRUE(journal->AppendStart({{"n3", 0}, "job3", 1, ""}).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ(journal->entries().size(), 1u);
  EXPECT_EQ(journal->entries()[0].key, (RankKey{"n3", 0}));
}

TEST_F(JournalTest, ASecondWorkerIsRefused) {
  absl::StatusOr<Journal> first = Journal::Open(dir_);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(Journal::Open(dir_).status().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace upipe::worker
