// The arithmetic of calibration: medians, the line through times of products, digits that are
// kept, and that the table tells every number.
#include "planner/calibrate/calibrate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "planner/calibrate/rates.h"
#include "planner/calibrate/timing.h"

namespace upipe::planner {
namespace {

using testing::HasSubstr;

TEST(Quantile, LiesBetweenItsNeighbours) {
  EXPECT_EQ(Quantile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(Quantile({4, 1, 2, 3}, 0.5), 2.5);
  EXPECT_EQ(Quantile({5}, 0.75), 5);
  EXPECT_EQ(Quantile({0, 10, 20, 30, 40}, 0.25), 10);
}

TEST(FitMatmul, FindsTheLineThatMadeTheTimes) {
  constexpr double kFlopsPerRow = 2e6, kRate = 5e10, kHalfRows = 40;
  const std::vector<double> rows = {32, 128, 512, 2048};
  std::vector<double> seconds;
  for (const double count : rows) seconds.push_back((count + kHalfRows) * kFlopsPerRow / kRate);
  const MatmulFit fit = FitMatmul(rows, seconds, kFlopsPerRow);
  EXPECT_NEAR(fit.flops / kRate, 1, 1e-9);
  EXPECT_NEAR(fit.half_rows, kHalfRows, 1e-6);
}

// A line of least absolute errors would follow the longest product and miss the short ones by 18 %.
TEST(FitMatmul, ErrorsAreRelative) {
  constexpr double kFlopsPerRow = 2e6;
  const std::vector<double> rows = {32, 64, 128, 2048};
  const std::vector<double> seconds = {40e-6, 72e-6, 136e-6, 2056e-6 * 1.1};  // the last was slow
  const MatmulFit fit = FitMatmul(rows, seconds, kFlopsPerRow);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_NEAR((rows[i] + fit.half_rows) * kFlopsPerRow / fit.flops / seconds[i], 1, 0.1);
  }
}

TEST(FitMatmul, RowsAreNeverNegative) {
  const MatmulFit fit = FitMatmul({10, 100}, {1e-6, 20e-6}, 2e6);  // small ones are faster
  EXPECT_EQ(fit.half_rows, 0);
  EXPECT_GT(fit.flops, 100 * 2e6 / 20e-6);
  EXPECT_LT(fit.flops, 10 * 2e6 / 1e-6);
}

// Two ranks whose streams wait: a clock sees it, processor time does not.
TEST(TimeInterleaved, BusyCountsProcessorTimeOnly) {
  const auto team = RankTeam::Create(comm::InprocGroup::Create(2, {}), {});
  ASSERT_TRUE(team.ok()) << team.status();
  const auto wait = [](TeamRank& rank) {
    rank.context().stream().Submit([](kernels::ExecContext&) {
      absl::SleepFor(absl::Milliseconds(20));  // what is measured
      return absl::OkStatus();
    });
    return absl::OkStatus();
  };
  const auto timings =
      TimeInterleaved(**team, {{.enqueue = wait}, {.enqueue = wait, .by_clock = true}},
                      {.seconds = 0, .busy = true});
  ASSERT_TRUE(timings.ok()) << timings.status();
  ASSERT_EQ(timings->size(), 2u);
  EXPECT_LT((*timings)[0].seconds, 0.010);
  EXPECT_GE((*timings)[1].seconds, 0.020);
  EXPECT_EQ((*timings)[0].rounds, 3);
}

TEST(TimeInterleaved, AFailureIsTheAnswer) {
  const auto team = RankTeam::Create(comm::InprocGroup::Create(2, {}), {});
  ASSERT_TRUE(team.ok()) << team.status();
  const auto fail = [](TeamRank& rank) -> absl::Status {
    if (rank.context().rank() == 1) return absl::UnavailableError("rank 1 is out of paper");
    return rank.context().comm().Barrier(rank.context().stream());
  };
  const absl::Status status = TimeInterleaved(**team, {{.enqueue = fail}}, {}).status();
  EXPECT_THAT(status.ToString(), HasSubstr("out of paper"));
}

TEST(FourDigits, KeepsFour) {
  EXPECT_EQ(FourDigits(163536934702.0235), 163500000000);
  EXPECT_EQ(FourDigits(6.753083333333333e-07), 6.753e-07);
  EXPECT_EQ(FourDigits(4.058177), 4.058);
  EXPECT_EQ(FourDigits(99996), 100000);
  EXPECT_EQ(FourDigits(0), 0);
}

TEST(RenderDevice, TellsEveryNumber) {
  v1::DeviceFile device;
  device.set_name("cpu");
  device.mutable_matmul_bf16()->set_flops(1.5e11);
  device.mutable_matmul_bf16()->set_half_rows(12);
  v1::DeviceFile::AttentionRate& rate = *device.add_attention_fp32();
  rate.set_length(4096);
  rate.set_forward_flops(2e10);
  rate.set_backward_flops(3e10);
  device.mutable_launch()->set_value(2e-6);
  device.mutable_exchange_in_node()->set_value(4e9);
  const std::string table = RenderDevice(device);
  EXPECT_THAT(table, HasSubstr("matmul bf16              150.0 GFLOP/s, half of it at 12 rows\n"));
  EXPECT_THAT(table, HasSubstr("attention fp32 4K        20.0 GFLOP/s forward, 30.0 backward\n"));
  EXPECT_THAT(table, HasSubstr("exchange in node         4 GB/s\n"));
  EXPECT_THAT(table, HasSubstr("op, at least             2 us\n"));
  EXPECT_THAT(table, testing::Not(HasSubstr("between nodes")));
}

}  // namespace
}  // namespace upipe::planner
