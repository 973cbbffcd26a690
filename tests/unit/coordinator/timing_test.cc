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

TEST(TimingTest, TheBackoffDoublesUpToItsLongest) {
  const Timing timing{.backoff_first = absl::Seconds(1), .backoff_longest = absl::Seconds(5)};
  EXPECT_EQ(timing.Backoff(0), absl::Seconds(1));
  EXPECT_EQ(timing.Backoff(2), absl::Seconds(4));
  EXPECT_EQ(timing.Backoff(3), absl::Seconds(5));
  EXPECT_EQ(timing.Backoff(1000), absl::Seconds(5));
  EXPECT_THAT(std::string(Timing{.backoff_first = absl::Minutes(6)}.Validate().message()),
              ::testing::HasSubstr("longest back-off"));
}

TEST(TimingTest, AStageMayTakeTenTimesTheLongestPieceOfWork) {
  v1::RunPlan plan;
  EXPECT_EQ(StageDeadline(plan, Timing()), absl::Seconds(30));
  v1::ModelSpec& model = *plan.mutable_spec()->mutable_model();
  model.set_num_layers(2);
  model.set_hidden_size(1000);
  model.set_intermediate_size(3000);
  model.set_vocab_size(1000);
  plan.set_tokens_per_rank(1000);
  EXPECT_EQ(StageDeadline(plan, Timing()), absl::Seconds(360));  // 12 x 3e9 / 1e9 x 10
  model.set_vocab_size(10'000);
  EXPECT_EQ(StageDeadline(plan, Timing()), absl::Seconds(600));
  plan.add_ranks()->set_step_flops(1e9);
  plan.add_ranks()->set_step_flops(800e9);
  for (int i = 0; i < 4; ++i) plan.mutable_schedule()->add_stages();
  EXPECT_EQ(StageDeadline(plan, Timing()), absl::Seconds(1000));  // 800e9 / 2 layers / 4 stages
}

TEST(TimingTest, CheckpointsGetTheTimeForTheirBytes) {
  v1::RunPlan plan;
  EXPECT_EQ(CheckpointAllowance(plan), absl::ZeroDuration());
  for (int r = 0; r < 2; ++r) {
    v1::TagBytes& tag = *plan.add_ranks()->mutable_host_memory()->add_tags();
    tag.set_tag("checkpoint");
    tag.set_peak_bytes(500'000'000);
  }
  EXPECT_EQ(CheckpointAllowance(plan), absl::Seconds(10));
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
