#include "coordinator/runtime/store_thread.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "coordinator/store/memory_store.h"

namespace upipe::coordinator {
namespace {

// Works until `good` commits are done, then fails for ever, as a disk does.
class FailingStore : public MemoryStore {
 public:
  explicit FailingStore(int good) : good_(good) {}
  absl::StatusOr<int64_t> Commit(absl::Span<const Batch> batches) override {
    ++commits;
    if (commits > good_) return absl::ResourceExhaustedError("disk full");
    return MemoryStore::Commit(batches);
  }
  int commits = 0;

 private:
  const int good_;
};

class StoreThreadTest : public ::testing::Test {
 protected:
  StoreThreadTest() : folder_((std::filesystem::temp_directory_path() / "upipe-thread-XXXXXX")) {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
    ballast_ = std::make_unique<Ballast>(folder_, 4096);
  }
  ~StoreThreadTest() override { std::filesystem::remove_all(folder_); }
  static std::vector<Batch> Put(int key) {
    return {Batch{{Write{absl::StrCat("k", key), "v", 0}}}};
  }
  StoreThread::Hooks Hooks() {
    return {[this](absl::Duration) { events_.TryPush("committed"); },
            [this](absl::Status status) { events_.TryPush(std::string(status.message())); }};
  }

  std::string folder_;
  std::unique_ptr<Ballast> ballast_;
  BoundedQueue<std::string> events_{1024};
};

TEST_F(StoreThreadTest, CommitsInOrderAndDrainsAtItsEnd) {
  MemoryStore store;
  uint64_t last = 0;
  {
    StoreThread thread(store, *ballast_, Hooks());
    EXPECT_TRUE(thread.AcceptsSubmits().ok());
    for (int i = 0; i < 500; ++i) last = thread.Commit(Put(i));
  }
  EXPECT_EQ(last, 500u);
  EXPECT_EQ(store.Revision(), 500);
  const auto entries = store.List("");
  for (const Entry& entry : *entries) {
    EXPECT_EQ(entry.key, absl::StrCat("k", entry.revision - 1));
  }
}

TEST_F(StoreThreadTest, AFailedCommitIsToldOnceAndNeverRetried) {
  FailingStore store(1);
  StoreThread thread(store, *ballast_, Hooks());
  const uint64_t first = thread.Commit(Put(1));
  EXPECT_EQ(*events_.Pop(), "committed");
  EXPECT_EQ(thread.committed(), first);
  thread.Commit(Put(2));
  EXPECT_EQ(*events_.Pop(), "disk full");
  thread.Commit(Put(3));
  EXPECT_FALSE(events_.PopFor(absl::Milliseconds(50)).has_value());
  EXPECT_EQ(store.commits, 2);
  EXPECT_EQ(thread.committed(), first);
}

}  // namespace
}  // namespace upipe::coordinator
