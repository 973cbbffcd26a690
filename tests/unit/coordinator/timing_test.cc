#include "coordinator/core/timing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace upipe::coordinator {
namespace {

TEST(TimingTest, ExpiryIsAutonomyKillBoundAndMargin) {
  EXPECT_EQ(Timing().Expiry(), absl::Seconds(323));
  const Timing fast{.heartbeat = absl::Milliseconds(200),
                    .kill_bound = absl::Seconds(2),
                    .autonomy = absl::Seconds(3),
                    .margin = absl::Seconds(1)};
  EXPECT_EQ(fast.Expiry(), absl::Milliseconds(6030));
  EXPECT_TRUE(fast.Validate().ok());
  EXPECT_EQ(fast.ToProto().heartbeat_millis(), 200);
}

TEST(TimingTest, NamesEveryBrokenRange) {
  const Timing broken{.heartbeat = absl::Seconds(10),
                      .kill_bound = absl::ZeroDuration(),
                      .autonomy = absl::Seconds(30)};
  const absl::Status status = broken.Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), ::testing::AllOf(::testing::HasSubstr("kill bound"),
                                                              ::testing::HasSubstr("autonomy")));
}

// What a flag of `nan` or `inf` becomes.
TEST(TimingTest, NothingIsEndless) {
  Timing endless;
  endless.autonomy = absl::InfiniteDuration();
  EXPECT_THAT(std::string(endless.Validate().message()), ::testing::HasSubstr("autonomy is inf"));
  endless = Timing();
  endless.start_deadline = absl::InfiniteDuration();
  EXPECT_FALSE(endless.Validate().ok());
}

}  // namespace
}  // namespace upipe::coordinator
