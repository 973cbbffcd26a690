// Planner children and their limits, with real processes.
#include "coordinator/runtime/planner_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/time/clock.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

class PlannerPoolTest : public ::testing::Test {
 protected:
  PlannerPoolTest() : folder_((std::filesystem::temp_directory_path() / "upipe-planner-XXXXXX")) {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~PlannerPoolTest() override { std::filesystem::remove_all(folder_); }

  PlannerPool::Options WithLimits(PlannerLimits limits) {
    return {std::getenv("UPIPE_FAKE_PLAN"), folder_, limits, 1};
  }
  static StartPlanner JobNamed(const std::string& name) {
    StartPlanner job{name, {}, 1 << 20};
    job.spec.set_name(name);
    job.spec.mutable_parallel()->set_ranks(2);
    return job;
  }
  std::function<void(PlanFinished)> Collect() {
    return [this](PlanFinished event) { results_.TryPush(std::move(event)); };
  }
  absl::StatusOr<v1::PlanResult> Next() { return results_.Pop()->result; }

  std::string folder_;
  BoundedQueue<PlanFinished> results_{16};
};

TEST_F(PlannerPoolTest, ReturnsThePlanAndLeavesNoFile) {
  PlannerPool pool(WithLimits({}), Collect());
  pool.Start(JobNamed("good"));
  const auto result = Next();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->plan().ranks_size(), 2);
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(PlannerPoolTest, LimitsCpuTimeWallTimeAndMemory) {
  {
    PlannerPool pool(WithLimits({.wall = absl::Milliseconds(200)}), Collect());
    pool.Start(JobNamed("loop"));
    EXPECT_EQ(Next().status().code(), absl::StatusCode::kDeadlineExceeded);
  }
  {
    PlannerPool pool(WithLimits({.cpu = absl::Seconds(1)}), Collect());
    pool.Start(JobNamed("loop"));
    EXPECT_THAT(std::string(Next().status().message()), HasSubstr("signal 24"));
  }
  PlannerPool pool(WithLimits({.address_bytes = 1 << 20}), Collect());
  pool.Start(JobNamed("good"));  // not even its libraries fit
  EXPECT_FALSE(Next().ok());
}

TEST_F(PlannerPoolTest, KillsOneJobAndGoesOn) {
  PlannerPool pool(WithLimits({}), Collect());
  pool.Start(JobNamed("loop"));
  pool.Kill("loop");
  EXPECT_FALSE(Next().ok());
  pool.Start(JobNamed("good"));
  EXPECT_TRUE(Next().ok());
}

TEST_F(PlannerPoolTest, SaysHowAChildEndedAndNamesAMissingBinary) {
  PlannerPool::Options options = WithLimits({});
  options.binary = folder_ + "/missing";
  PlannerPool pool(options, Collect());
  pool.Start(JobNamed("good"));
  EXPECT_THAT(std::string(Next().status().message()), HasSubstr("code 127, said: cannot execute"));
}

}  // namespace
}  // namespace upipe::coordinator
