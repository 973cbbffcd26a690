// metrics.jsonl of a job: appended over restarts, never twice, never at the price of a wait; what
// is missing is said.
#include "coordinator/runtime/step_recorder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_split.h"
#include "common/metrics/step_line.h"

namespace upipe::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;

v1::StepReport Step(int64_t number) {
  v1::StepReport report;
  report.set_step(number);
  report.set_loss(1.0 / static_cast<double>(number));
  return report;
}

class StepRecorderTest : public ::testing::Test {
 protected:
  StepRecorderTest() : folder_(std::filesystem::temp_directory_path() / "upipe-steps-XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~StepRecorderTest() override { std::filesystem::remove_all(folder_); }

  StepRecorder::Options Options() const { return {.jobs_dir = folder_ + "/jobs"}; }
  std::string Path(const std::string& job) const {
    return folder_ + "/jobs/" + job + "/metrics.jsonl";
  }
  // A recorder's whole life: a coordinator that starts, hears of these steps and ends.
  void Record(const std::string& job, const std::vector<int64_t>& steps) const {
    StepRecorder recorder(Options());
    for (const int64_t step : steps) recorder.Record(job, Step(step));
  }
  static std::string Read(const std::string& path) {
    std::stringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  // (step, missing before it) of every line.
  static std::vector<std::pair<int64_t, int64_t>> Steps(const std::string& text) {
    std::vector<std::pair<int64_t, int64_t>> steps;
    for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      const absl::StatusOr<StepLine> read = ParseStepLine(line);
      EXPECT_TRUE(read.ok()) << line;
      if (read.ok()) steps.emplace_back(read->report.step(), read->missing_steps);
    }
    return steps;
  }
  void Write(const std::string& job, const std::string& text) const {
    std::filesystem::create_directories(folder_ + "/jobs/" + job);
    std::ofstream(Path(job)) << text;
  }

  std::string folder_;
};

TEST_F(StepRecorderTest, EveryJobHasItsFile) {
  {
    StepRecorder recorder(Options());
    for (const int step : {1, 2}) {
      recorder.Record("a", Step(step));
      recorder.Record("b", Step(10 * step));
    }
  }
  EXPECT_THAT(Steps(Read(Path("a"))), ElementsAre(Pair(1, 0), Pair(2, 0)));
  EXPECT_THAT(Steps(Read(Path("b"))), ElementsAre(Pair(10, 9), Pair(20, 9)));
}

TEST_F(StepRecorderTest, ARestartAppendsAndRepeatsNothing) {
  Record("a", {1, 2, 3});
  const std::string before = Read(Path("a"));
  Record("a", {2, 3, 4, 4, 7});
  EXPECT_THAT(Read(Path("a")), ::testing::StartsWith(before));
  EXPECT_THAT(Steps(Read(Path("a"))),
              ElementsAre(Pair(1, 0), Pair(2, 0), Pair(3, 0), Pair(4, 0), Pair(7, 2)));
}

TEST_F(StepRecorderTest, ALineLeftUnfinishedIsCutOff) {
  Record("a", {1, 2});
  const std::string whole = Read(Path("a"));
  Write("a", whole.substr(0, whole.size() - 30));  // the second line's end is missing
  Record("a", {2, 3});
  EXPECT_THAT(Steps(Read(Path("a"))), ElementsAre(Pair(1, 0), Pair(2, 0), Pair(3, 0)));
  Write("b", "{\"rank\":0,\"st");
  Record("b", {1});
  EXPECT_THAT(Steps(Read(Path("b"))), ElementsAre(Pair(1, 0)));
}

TEST_F(StepRecorderTest, LinesOfAnotherKindAreReadPast) {
  Record("a", {1, 2});
  Write("a", Read(Path("a")) + "written by hand\n");
  Record("a", {2, 3});
  EXPECT_THAT(Read(Path("a")), HasSubstr("by hand\n{\"rank\":0,\"step\":3,\"total"));
}

// A pipe that nobody reads is the slowest disk there is: it holds 64 KiB.
TEST_F(StepRecorderTest, ASlowDiskCostsTheOldestReportsAndNoWait) {
  Write("a", "");
  std::filesystem::remove(Path("a"));
  ASSERT_EQ(mkfifo(Path("a").c_str(), 0600), 0);
  const int fd = open(Path("a").c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  StepRecorder::Options options = Options();
  options.max_waiting = 100;
  std::string text;
  {
    StepRecorder recorder(options);
    for (int64_t step = 1; step <= 5000; ++step) recorder.Record("a", Step(step));
    while (text.find("\"step\":5000,") == std::string::npos || text.back() != '\n') {
      char buffer[4096];
      const ssize_t got = read(fd, buffer, sizeof buffer);
      if (got > 0) text.append(buffer, static_cast<size_t>(got));
      std::this_thread::yield();
    }
  }
  close(fd);
  const auto steps = Steps(text);
  EXPECT_LT(steps.size(), 5000u);
  int64_t last = 0;
  for (const auto& [step, missing] : steps) {
    EXPECT_EQ(missing, step - last - 1);
    last = step;
  }
  // The newest are kept: all that had room to wait.
  ASSERT_GE(steps.size(), 100u);
  EXPECT_EQ(last, 5000);
  EXPECT_EQ(steps[steps.size() - 100].first, 4901);
}

TEST_F(StepRecorderTest, AFullDiskIsOneWarningAndItsEndIsTold) {
  Write("a", "");
  std::filesystem::remove(Path("a"));
  std::filesystem::create_symlink("/dev/full", Path("a"));
  ::testing::internal::CaptureStderr();
  {
    StepRecorder recorder(Options());
    for (int64_t step = 1; step <= 50; ++step) recorder.Record("a", Step(step));
  }
  std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("step reports are lost: "));
  EXPECT_THAT(said, HasSubstr("No space left"));
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  ::testing::internal::CaptureStderr();
  {
    StepRecorder recorder(Options());
    recorder.Record("a", Step(51));
    recorder.Record("b", Step(1));  // written after a: jobs go by name
  }
  said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("written again; 1 were lost"));
}

// A file that grew to the process's limit and must not shrink: half a line goes in and cannot be
// taken back.
TEST_F(StepRecorderTest, HalfALineThatStayedIsCutOffBeforeTheNext) {
  constexpr off_t kBefore = 1 << 30;  // a hole, more than anything else this process writes
  Write("a", "");
  std::filesystem::remove(Path("a"));
  const int fd = memfd_create("metrics", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(pwrite(fd, "\n", 1, kBefore - 1), 1);
  ASSERT_EQ(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  std::filesystem::create_symlink(absl::StrCat("/proc/self/fd/", fd), Path("a"));
  signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit = {kBefore + 20, old_limit.rlim_max};
  StepRecorder recorder(Options());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  recorder.Record("a", Step(1));
  recorder.Record("b", Step(1));  // written after a: jobs go by name
  while (Read(Path("b")).empty()) std::this_thread::yield();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::string half(20, ' ');
  ASSERT_EQ(pread(fd, half.data(), half.size(), kBefore), 20);
  EXPECT_THAT(half, ::testing::StartsWith("{\"rank\":0,"));
  close(fd);
  std::filesystem::remove(Path("a"));
  Write("a", half);
  recorder.Record("a", Step(2));
  recorder.Record("b", Step(2));
  while (std::ranges::count(Read(Path("b")), '\n') < 2) std::this_thread::yield();
  EXPECT_THAT(Steps(Read(Path("a"))), ElementsAre(Pair(2, 1)));
}

TEST_F(StepRecorderTest, LeavesTheStoreItsRoom) {
  StepRecorder::Options options = Options();
  options.min_free_bytes = int64_t{1} << 60;
  ::testing::internal::CaptureStderr();
  {
    StepRecorder recorder(options);
    recorder.Record("a", Step(1));
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("leave"));
  EXPECT_THAT(Read(Path("a")), IsEmpty());
}

}  // namespace
}  // namespace upipe::coordinator
