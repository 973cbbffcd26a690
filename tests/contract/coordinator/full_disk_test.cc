// The store, its thread and the ballast on a small disk that somebody else fills: new submits are
// refused in time, and the transitions of what lives already fit into the room that was kept.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "coordinator/runtime/store_thread.h"
#include "coordinator/store/sqlite_store.h"

namespace upipe::coordinator {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBallastBytes = 16 << 20;  // as in production
constexpr absl::Duration kPatience = absl::Seconds(20);

class FullDiskTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / "upipe-full-XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
    if (mount("tmpfs", folder_.c_str(), "tmpfs", 0, "size=48m") != 0) {
      fs::remove(folder_);
      GTEST_SKIP() << "may not mount a small disk";
    }
    mounted_ = true;
    store_ = *SqliteStore::Open(folder_ + "/store");
    ballast_ = std::make_unique<Ballast>(folder_, kBallastBytes);
    thread_ = std::make_unique<StoreThread>(
        *store_, *ballast_,
        StoreThread::Hooks{[this](absl::Duration) { events_.TryPush(absl::OkStatus()); },
                           [this](absl::Status status) { events_.TryPush(std::move(status)); }});
  }
  void TearDown() override {
    thread_.reset();
    store_.reset();
    if (!mounted_) return;
    umount2(folder_.c_str(), MNT_DETACH);
    fs::remove(folder_);
  }

  void Fill() {
    std::ofstream file(folder_ + "/fill", std::ios::binary | std::ios::app);
    const std::string block(4096, 'x');
    while (file.write(block.data(), 4096).flush()) {
    }
  }
  // Whether the thread comes to accept submits, or to refuse them: it looks once a second.
  bool Accepts(bool wanted) {
    for (int i = 0; i < 1000 && thread_->AcceptsSubmits().ok() != wanted; ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    return thread_->AcceptsSubmits().ok() == wanted;
  }
  // The record of a job as its transitions write it over and over.
  absl::Status Transition(int64_t number) {
    std::string record(2000, 'a');
    std::mt19937 random(number);
    for (char& byte : record) byte = static_cast<char>(random());
    const uint64_t step =
        thread_->Commit({Batch{{Write{absl::StrCat("job/", number % 50), record}}}});
    while (thread_->committed() < step) {
      const auto event = events_.PopFor(kPatience);
      if (!event) return absl::DeadlineExceededError("no commit");
      if (!event->ok()) return *event;
    }
    return absl::OkStatus();
  }

  std::string folder_;
  bool mounted_ = false;
  std::unique_ptr<SqliteStore> store_;
  std::unique_ptr<Ballast> ballast_;
  BoundedQueue<absl::Status> events_{4096};
  std::unique_ptr<StoreThread> thread_;
};

TEST_F(FullDiskTest, TransitionsGoOnInTheRoomThatWasKeptAndSubmitsWait) {
  ASSERT_TRUE(Accepts(true)) << thread_->AcceptsSubmits();
  ASSERT_TRUE(Transition(0).ok());
  Fill();
  ASSERT_TRUE(Accepts(false));
  EXPECT_TRUE(absl::IsResourceExhausted(thread_->AcceptsSubmits()));
  // Several times what the log holds before it is moved into the file.
  for (int64_t number = 1; number < 3000; ++number) {
    const absl::Status status = Transition(number);
    ASSERT_TRUE(status.ok()) << "transition " << number << ": " << status;
  }
  EXPECT_FALSE(thread_->AcceptsSubmits().ok());
  EXPECT_FALSE(fs::exists(folder_ + "/ballast"));
  fs::remove(folder_ + "/fill");
  EXPECT_TRUE(Accepts(true));
  EXPECT_EQ(fs::file_size(folder_ + "/ballast"), kBallastBytes);
}

}  // namespace
}  // namespace upipe::coordinator
