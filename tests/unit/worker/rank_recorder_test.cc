#include "worker/launcher/rank_recorder.h"

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::worker {
namespace {

namespace fs = std::filesystem;
using ::testing::UnorderedElementsAre;

class RankRecorderTest : public ::testing::Test {
 protected:
  RankRecorderTest() {
    std::string pattern = (fs::temp_directory_path() / "rank-recorder-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
  }
  ~RankRecorderTest() override { fs::remove_all(root_); }

  // An attempt whose one log was last written `age` ago.
  void MakeAttempt(const std::string& attempt, size_t bytes, std::chrono::minutes age) {
    const fs::path dir = fs::path(root_) / attempt / "r0";
    fs::create_directories(dir);
    std::ofstream(dir / "log.00000000000000000000") << std::string(bytes, 'x');
    fs::last_write_time(dir / "log.00000000000000000000", fs::file_time_type::clock::now() - age);
    fs::last_write_time(dir.parent_path(), fs::file_time_type::clock::now() - age);
  }
  // Prunes and waits: what the recorder was told before its end is done.
  void Prune(int64_t bytes, size_t attempts) {
    std::vector<std::string> deleted;
    {
      RankRecorder recorder;
      recorder.KeepWithin({root_, bytes, attempts},
                          [&](std::string job) { deleted.push_back(std::move(job)); });
    }
    deleted_ = deleted;
  }
  std::vector<std::string> Attempts() const {
    std::vector<std::string> found;
    for (const auto& job : fs::directory_iterator(root_)) {
      for (const auto& attempt : fs::directory_iterator(job))
        found.push_back(fs::relative(attempt, root_).string());
    }
    return found;
  }

  std::string root_;
  std::vector<std::string> deleted_;
};

TEST_F(RankRecorderTest, TheOldestAttemptsGoFirst) {
  MakeAttempt("a/g1", 400, std::chrono::minutes(50));
  MakeAttempt("a/g2", 400, std::chrono::minutes(10));
  MakeAttempt("b/g1", 400, std::chrono::minutes(40));
  MakeAttempt("c/g7", 400, std::chrono::minutes(30));
  Prune(10000, 10);
  EXPECT_EQ(Attempts().size(), 4u);
  EXPECT_THAT(deleted_, UnorderedElementsAre());
  Prune(1000, 10);  // two of four fit
  EXPECT_THAT(Attempts(), UnorderedElementsAre("a/g2", "c/g7"));
  EXPECT_THAT(deleted_, UnorderedElementsAre("b"));  // `a` has another
  Prune(10000, 1);
  EXPECT_THAT(Attempts(), UnorderedElementsAre("a/g2"));
  EXPECT_THAT(deleted_, UnorderedElementsAre("c"));
}

TEST_F(RankRecorderTest, AnOpenLogStaysHoweverLittleFits) {
  MakeAttempt("a/g1", 400, std::chrono::minutes(50));
  MakeAttempt("b/g1", 400, std::chrono::minutes(10));
  RankRecorder recorder;
  const absl::StatusOr<int> fd = recorder.OpenLog({"n", 0}, root_ + "/a/g1/r0");
  ASSERT_TRUE(fd.ok());
  std::promise<std::string> deleted;
  recorder.KeepWithin({root_, 0, 0}, [&](std::string job) { deleted.set_value(std::move(job)); });
  EXPECT_EQ(deleted.get_future().get(), "b");
  EXPECT_THAT(Attempts(), UnorderedElementsAre("a/g1"));
  close(*fd);
}

TEST_F(RankRecorderTest, StepRecordsAreBounded) {
  const std::string path = root_ + "/metrics.jsonl";
  {
    RankRecorder recorder(8 << 20, /*lines_bytes=*/1000);
    for (int i = 0; i < 100; ++i) recorder.AppendLine(path, absl::StrCat(i, std::string(97, '.')));
  }
  EXPECT_LE(fs::file_size(path), 1000u);
  EXPECT_LE(fs::file_size(path + ".1"), 1000u);
  std::string line, last;
  std::ifstream older(path + ".1"), newer(path);
  while (std::getline(older, line)) last = line;
  const int before = std::stoi(last);
  ASSERT_TRUE(std::getline(newer, line));
  EXPECT_EQ(std::stoi(line), before + 1);
  while (std::getline(newer, line)) last = line;
  EXPECT_EQ(std::stoi(last), 99);
}

}  // namespace
}  // namespace upipe::worker
