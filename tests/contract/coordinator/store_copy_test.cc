// Copies of a store that is in use: whole, of one revision, and never at the store's expense.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/runtime/store_thread.h"
#include "coordinator/store/sqlite_store.h"
#include "tests/support/coordinator/faulty_disk.h"

namespace upipe::coordinator {
namespace {

using testing::FaultyDisk;

constexpr int kKeys = 1200;

std::vector<Batch> Put(int key, int64_t value) {
  return {Batch{{Write{absl::StrCat("k", 1000 + key % kKeys), std::string(3000, 'a' + value % 26)},
                 Write{"last", absl::StrCat(value)}}}};
}

void ExpectEqual(const std::vector<Entry>& got, const std::vector<Entry>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].key, expected[i].key);
    EXPECT_TRUE(got[i].value == expected[i].value) << got[i].key;
    EXPECT_EQ(got[i].revision, expected[i].revision) << got[i].key;
  }
}

class StoreCopyTest : public ::testing::Test {
 protected:
  StoreCopyTest() : store_(*SqliteStore::Open("/store", disk_.vfs())) {
    for (int key = 0; key < kKeys; ++key) EXPECT_TRUE(store_->Commit(Put(key, key)).ok());
  }

  FaultyDisk disk_;
  std::unique_ptr<SqliteStore> store_;
};

TEST_F(StoreCopyTest, HoldsTheRevisionOfItsEndWhateverWasCommittedMeanwhile) {
  auto copy = store_->StartCopy("/copy");
  ASSERT_TRUE(copy.ok()) << copy.status();
  int steps = 0;
  bool whole = false;
  while (!whole) {
    const auto step = (*copy)->Step();
    ASSERT_TRUE(step.ok()) << step.status();
    whole = *step;
    ++steps;
    // Pages that are copied already, and pages that are not yet.
    ASSERT_TRUE(whole || store_->Commit(Put(steps * 37, 1000 + steps)).ok());
  }
  EXPECT_GT(steps, 3);
  const std::vector<Entry> expected = *store_->List("");
  const int64_t revision = store_->Revision();
  ASSERT_TRUE(store_->Commit(Put(1, 2000)).ok());
  const auto copied = SqliteStore::Open("/copy", disk_.vfs());
  ASSERT_TRUE(copied.ok()) << copied.status();
  EXPECT_TRUE((*copied)->CheckIntegrity().ok());
  EXPECT_EQ((*copied)->Revision(), revision);
  ExpectEqual(*(*copied)->List(""), expected);
}

TEST_F(StoreCopyTest, ACopyThatFailsOrIsGivenUpLeavesTheStoreUnharmed) {
  for (const FaultyDisk::Fault fault : {FaultyDisk::Fault::kFull, FaultyDisk::Fault::kWriteError}) {
    auto copy = store_->StartCopy(absl::StrCat("/copy", static_cast<int>(fault)));
    ASSERT_TRUE(copy.ok()) << copy.status();
    disk_.Arm(fault, 2);
    absl::StatusOr<bool> step = false;
    while (step.ok() && !*step) step = (*copy)->Step();
    EXPECT_FALSE(step.ok());
    EXPECT_EQ(absl::IsResourceExhausted(step.status()), fault == FaultyDisk::Fault::kFull);
    disk_.Arm(FaultyDisk::Fault::kNone, 0);
    EXPECT_TRUE(store_->Commit(Put(1, 3000)).ok());
  }
  auto copy = store_->StartCopy("/given-up");
  ASSERT_TRUE((*copy)->Step().ok());
  copy->reset();
  EXPECT_TRUE(store_->Commit(Put(2, 3001)).ok());
  EXPECT_TRUE(store_->CheckIntegrity().ok());
}

// The thread copies between commits: those of a busy coordinator all get through.
TEST_F(StoreCopyTest, TheStoreThreadCopiesBetweenCommits) {
  std::string folder = (std::filesystem::temp_directory_path() / "upipe-copy-XXXXXX");
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  Ballast ballast(folder, 4096);
  BoundedQueue<std::shared_ptr<absl::StatusOr<int64_t>>> copied{2};
  BoundedQueue<uint64_t> committed{4096};
  std::unique_ptr<StoreThread> thread;
  thread = std::make_unique<StoreThread>(
      *store_, ballast,
      StoreThread::Hooks{[&](absl::Duration) { committed.TryPush(1); },
                         [](absl::Status) { FAIL(); }});
  const auto done = [&](absl::StatusOr<int64_t> revision) {
    copied.TryPush(std::make_shared<absl::StatusOr<int64_t>>(std::move(revision)));
  };
  thread->Copy("/copy", done);
  std::optional<std::shared_ptr<absl::StatusOr<int64_t>>> revision;
  int commits = 0;
  while (!revision) {
    const uint64_t number = thread->Commit(Put(commits, commits));
    ++commits;
    while (thread->committed() < number) ASSERT_TRUE(committed.PopFor(absl::Seconds(20)));
    revision = copied.PopFor(absl::ZeroDuration());
  }
  ASSERT_TRUE((*revision)->ok()) << (*revision)->status();
  EXPECT_GT(commits, 3);
  EXPECT_EQ((*SqliteStore::Open("/copy", disk_.vfs()))->Revision(), ***revision);
  thread->Copy("/second", done);  // is not whole before the thread ends, or is
  thread.reset();
  const auto second = copied.PopFor(absl::ZeroDuration());
  ASSERT_TRUE(second);
  EXPECT_TRUE((*second)->ok() || absl::IsCancelled((*second)->status())) << (*second)->status();
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace upipe::coordinator
