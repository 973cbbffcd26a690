// Pictures: axes that people can read, numbers where they belong, text that cannot break the page.
#include "common/chart/charts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace upipe::chart {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

LineChart Line() {
  return {.title = "loss <&> \"more\"",
          .series = {{.name = "training", .colour = "--train", .points = {{1, 5}, {2, 3}, {3, 4}}}},
          .levels = {{.value = 3.5, .label = "unigram <3.5>", .colour = "--unigram"}}};
}

TEST(Charts, TextIsEscaped) {
  const std::string svg = RenderLineChart(Line());
  EXPECT_THAT(svg, HasSubstr("loss &lt;&amp;&gt; &quot;more&quot;"));
  EXPECT_THAT(svg, HasSubstr("unigram &lt;3.5&gt;"));
  EXPECT_THAT(svg, Not(HasSubstr("<3.5>")));
}

TEST(Charts, ALineSpansTheChartAndHigherIsFurtherUp) {
  LineChart chart = Line();
  chart.canvas = {.width = 540, .height = 300};
  chart.from_zero = true;
  chart.levels.clear();
  chart.series[0].points = {{1, 0}, {2, 10}};
  // Left edge 58, right edge 540 - 112; bottom 300 - 34; the top of the axis is 6 % above the
  // highest value.
  EXPECT_THAT(RenderLineChart(chart), HasSubstr("d=\"M58.00 266.00L428.00 28.26\""));
}

TEST(Charts, ASinglePointIsDrawn) {
  LineChart chart = Line();
  chart.levels.clear();
  chart.series[0].points = {{1, 5}};
  EXPECT_THAT(RenderLineChart(chart), Not(HasSubstr("nan")));
}

TEST(Charts, BandsStackOnEachOther) {
  const StackChart chart = {.title = "memory",
                            .canvas = {.width = 370, .height = 148},
                            .bands = {{.name = "low", .colour = "--a", .values = {50, 50}},
                                      {.name = "high", .colour = "--b", .values = {50, 0}}},
                            .columns = {"one", "two"},
                            .height = 200};
  const std::string svg = RenderStackChart(chart);
  // 100 pixels for 200 bytes, from y = 114 upwards; 100 pixels a column, from x = 58.
  EXPECT_THAT(svg, HasSubstr("d=\"M58.00 89.00L158.00 89.00L158.00 89.00L258.00 89.00L"));
  EXPECT_THAT(svg, HasSubstr("d=\"M58.00 64.00L158.00 64.00L158.00 89.00L258.00 89.00L"));
  EXPECT_THAT(svg, HasSubstr("one\ntotal 100 B\nhigh 50 B\nlow 50 B"));
}

TEST(Charts, BarsAreInProportion) {
  const BarChart chart = {.title = "bars",
                          .width = 278,
                          .groups = {"q", "together"},
                          .series = {{.name = "UPipe", .colour = "--u", .values = {25, 100}}}};
  const std::string svg = RenderBarChart(chart);
  EXPECT_THAT(svg, HasSubstr("width=\"25.00\" height=\"13.00\""));
  EXPECT_THAT(svg, HasSubstr("width=\"100.00\" height=\"13.00\""));
}

}  // namespace
}  // namespace upipe::chart
