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

TEST_F(JournalTest, NumbersTheStartsOfItsFolder) {
  std::string state_id;
  for (int64_t start = 1; start <= 3; ++start) {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal.ok()) << journal.status();
    EXPECT_EQ(journal->start_number(), start);
    if (start == 1) state_id = journal->state_id();
    EXPECT_EQ(journal->state_id(), state_id);
    if (start == 2) {
      EXPECT_TRUE(journal->Forget().ok());  // rewrites the file
    }
  }
  EXPECT_FALSE(state_id.empty());
  std::filesystem::remove(dir_ + "/journal");
  EXPECT_NE(Journal::Open(dir_)->state_id(), state_id);
}

TEST_F(JournalTest, ForgetDropsEntriesAndKeepsTheGenerationsAsked) {
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal->AppendStart({{"n1", 0}, "job", 3, "/cg/a"}).ok());
    ASSERT_TRUE(journal->AppendFence("long-gone", 8).ok());
  }
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal->Forget().ok());
    EXPECT_EQ(journal->generations().at("long-gone"), 8);
    ASSERT_TRUE(journal->Forget({{"job"}}).ok());
    ASSERT_TRUE(journal->AppendStart({{"n2", 0}, "job2", 1, ""}).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ(journal->entries().size(), 1u);
  EXPECT_EQ(journal->entries()[0].job, "job2");
  EXPECT_EQ(journal->generations().at("job"), 3);
  EXPECT_FALSE(journal->generations().contains("long-gone"));
}

TEST_F(JournalTest, ALongLifeDoesNotMakeALongJournal) {
  const std::string cgroup(40000, 'c');  // 1 MiB within few appends, each of which is synced
  {
    absl::StatusOr<Journal> journal = Journal::Open(dir_);
    ASSERT_TRUE(journal->AppendStart({{"alive", 0}, "job", 3, "/cg/a"}).ok());
    ASSERT_TRUE(journal->AppendPid({"alive", 0}, {4711, 99}).ok());
    for (int i = 0; i < 30; ++i) {
      ASSERT_TRUE(journal->AppendStart({{absl::StrCat("n", i), 0}, "job", 4 + i, cgroup}).ok());
      ASSERT_TRUE(journal->AppendGone({absl::StrCat("n", i), 0}).ok());
    }
    EXPECT_LT(std::filesystem::file_size(dir_ + "/journal"), 1u << 20);
    ASSERT_TRUE(journal->AppendStart({{"last", 1}, "job", 34, ""}).ok());
  }
  absl::StatusOr<Journal> journal = Journal::Open(dir_);
  ASSERT_TRUE(journal.ok()) << journal.status();
  ASSERT_EQ(journal->entries().size(), 2u);
  EXPECT_EQ(journal->entries()[0].key, (RankKey{"alive", 0}));
  EXPECT_EQ(journal->entries()[0].cgroup, "/cg/a");
  EXPECT_EQ(journal->entries()[0].process, (ProcessId{4711, 99}));
  EXPECT_EQ(journal->entries()[1].key, (RankKey{"last", 1}));
  EXPECT_EQ(journal->generations().at("job"), 34);
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
  for (const char* line : {"start job one n1 0 -", "start job 1 n1 -1 -", "pid n1 0 -4 7 boot",
                           "pid n1 -2 4 7 boot", "gone n1 -1", "opened n1 0"}) {
    std::filesystem::remove(dir_ + "/journal");
    AppendRaw(absl::StrCat(line, "\n"));
    EXPECT_EQ(Journal::Open(dir_).status().code(), absl::StatusCode::kDataLoss) << line;
  }
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
