// Loss by position: which evaluations are shown, what training's line means, where ranges lie.
#include "common/report/position_chart.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace upipe::report {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

void Add(Positions* positions, int64_t begin, int64_t end, double loss, int64_t tokens) {
  v1::PositionLoss& range = *positions->Add();
  range.set_begin(begin);
  range.set_end(end);
  range.set_loss(loss);
  range.set_tokens(tokens);
}

// Steps 1 to `steps`, each with two ranges of training loss; evaluated every `every` steps.
std::vector<v1::StepReport> ARun(int steps, int every) {
  std::vector<v1::StepReport> reports(steps);
  for (int i = 0; i < steps; ++i) {
    reports[i].set_step(i + 1);
    Add(reports[i].mutable_loss_by_position(), 0, 4096, 5, 4096);
    Add(reports[i].mutable_loss_by_position(), 4096, 8192, 4, 4095);
    if ((i + 1) % every == 0) {
      Add(reports[i].mutable_held_out_loss_by_position(), 0, 4096, 3, 10);
    }
  }
  return reports;
}

std::vector<std::string> Names(const std::vector<PositionCurve>& curves) {
  std::vector<std::string> names;
  for (const PositionCurve& curve : curves) names.push_back(curve.name);
  return names;
}

TEST(PositionCurves, FirstAndLastEvaluationAndTwoBetween) {
  EXPECT_THAT(Names(PositionCurves(ARun(60, 60))), ElementsAre("step 60", "training"));
  EXPECT_THAT(Names(PositionCurves(ARun(100, 10))),
              ElementsAre("step 10", "step 40", "step 70", "step 100", "training"));
  EXPECT_EQ(PositionCurves(ARun(60, 60))[0].colour, "--evaluation-4");
  EXPECT_EQ(PositionCurves(ARun(60, 20))[0].colour, "--evaluation-2");
}

TEST(PositionCurves, NothingMeasuredIsNoCurve) {
  EXPECT_THAT(PositionCurves({}), IsEmpty());
  EXPECT_THAT(PositionCurves(std::vector<v1::StepReport>(3)), IsEmpty());
}

TEST(PositionCurves, TrainingIsTheLastTenthByTokens) {
  std::vector<v1::StepReport> reports = ARun(20, 100);
  for (const int i : {18, 19}) reports[i].clear_loss_by_position();
  Add(reports[18].mutable_loss_by_position(), 0, 4096, 2, 300);
  Add(reports[19].mutable_loss_by_position(), 0, 4096, 3, 100);
  Add(reports[19].mutable_loss_by_position(), 4096, 8192, std::nan(""), 100);
  const std::vector<PositionCurve> curves = PositionCurves(reports);
  ASSERT_THAT(curves, SizeIs(1));
  ASSERT_THAT(curves[0].ranges, SizeIs(1));
  EXPECT_DOUBLE_EQ(curves[0].ranges[0].loss(), 2.25);
  EXPECT_EQ(curves[0].ranges[0].tokens(), 400);
}

TEST(PositionChart, TheAxisGrowsByOneForEveryFactorOfFour) {
  EXPECT_DOUBLE_EQ(PositionOnAxis(0), 0);
  EXPECT_DOUBLE_EQ(PositionOnAxis(256), 1);  // a short context fills the first range
  EXPECT_DOUBLE_EQ(PositionOnAxis(4096), 1);
  EXPECT_DOUBLE_EQ(PositionOnAxis(8192), 1.5);
  EXPECT_DOUBLE_EQ(PositionOnAxis(16384), 2);
  EXPECT_DOUBLE_EQ(PositionOnAxis(1 << 20), 5);
}

TEST(PositionChart, RangesAreLevelStretchesBetweenNamedEdges) {
  PositionCurve curve = {.name = "step 7", .colour = "--evaluation-4"};
  Positions ranges;
  Add(&ranges, 0, 4096, 5, 1);
  Add(&ranges, 4096, 16384, 4, 1);
  curve.ranges.assign(ranges.begin(), ranges.end());
  // 200 pixels for two ranges, from x = 58.
  const std::string svg = RenderPositionChart({curve}, {.width = 370, .height = 148});
  EXPECT_THAT(svg, testing::ContainsRegex("d=\"M58.00 [0-9.]+L158.00 [0-9.]+L158.00 [0-9.]+L258"));
  for (const char* edge : {">0<", ">4K<", ">16K<"}) EXPECT_THAT(svg, HasSubstr(edge));
  EXPECT_THAT(svg, HasSubstr("positions 4K to 16K\nstep 7 4.0000 nats"));
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
}

TEST(PositionChart, ALossThatIsNoNumberIsLeftOut) {
  PositionCurve curve = {.name = "step 7", .colour = "--evaluation-4"};
  Positions ranges;
  Add(&ranges, 0, 4096, std::nan(""), 1);
  curve.ranges.assign(ranges.begin(), ranges.end());
  EXPECT_EQ(RenderPositionChart({curve}, {}), "");
}

}  // namespace
}  // namespace upipe::report
