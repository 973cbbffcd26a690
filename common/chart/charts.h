// Charts as inline SVG: pure functions from numbers to text. Colours are the CSS variables of
// palette.h, so light and dark are one document; every mark carries a <title>, which browsers show
// on hover. What is no number leaves a gap.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common/chart/scale.h"

namespace upipe::chart {

// Size in pixels, as the page shows it, so that text is equally large in every chart.
struct Canvas {
  double width = 540;
  double height = 300;
  // For narrow screens: few ticks, no names at the lines' ends (a key beside the chart has them),
  // nothing to hover.
  bool compact = false;
};

struct Point {
  double x = 0;
  double y = 0;
};

// A line over the steps of a job, or over another axis.
struct LineSeries {
  std::string name;
  std::string colour;         // a CSS variable: "--train"
  std::vector<Point> points;  // ascending x
  bool markers = false;       // for few, separate measurements
};

// A level to compare with: a dashed line across the chart, labelled at its right end.
struct Level {
  double value = 0;
  std::string label;
  std::string colour;
};

// A place of the x axis with its name.
struct AxisTick {
  double value = 0;
  std::string label;
};
// A stretch of the x axis and what it tells on hover.
struct AxisColumn {
  double from = 0;
  double to = 0;
  std::string text;
};

// A place of the x axis where something happened: a dashed rule with a few words at its top.
struct AxisMark {
  double value = 0;
  std::string label;
};

struct LineChart {
  std::string title;  // read by screen readers
  Canvas canvas = {};
  std::vector<LineSeries> series;
  std::vector<Level> levels;
  std::vector<AxisMark> marks = {};
  // An x axis of other things than steps: name, ticks and hover columns, all together.
  std::string axis_name = "step";
  std::vector<AxisTick> axis_ticks = {};      // empty: whole numbers
  std::vector<AxisColumn> axis_columns = {};  // empty: one per point of the first series
  bool from_zero = false;
  std::string unit;  // after values on hover
  std::function<std::string(double)> format = PlainNumber;
};
// The first series has a point.
std::string RenderLineChart(const LineChart& chart);

// At most about 2 * `buckets` of the points, the lowest and the highest of each stretch among them,
// so that no peak is lost; the first and the last stay.
std::vector<Point> Thin(const std::vector<Point>& points, size_t buckets);

// Amounts by category, stacked, over steps or over the moments of one step.
struct Band {
  std::string name;
  std::string colour;
  std::vector<double> values;  // one per column, all bands alike
};
// A stretch of columns with a name, marked below the axis: a pass of a step.
struct Section {
  std::string name;
  size_t begin = 0;  // column
  size_t end = 0;    // one past the last
};
struct StackChart {
  std::string title;
  Canvas canvas = {};
  std::vector<Band> bands;           // bottom first
  std::vector<Section> sections;     // empty: columns are steps
  Range steps = {0, 0};              // first and last of them; equal: 1, 2, .. a column
  std::vector<std::string> columns;  // what a column is, on hover
  double planned_peak = 0;           // the line to stay under
  std::string planned_label = "planned peak";
  double limit = 0;      // another line, above; 0 = none
  double height = 0;     // top of the axis; 0 = as high as needed
  bool in_bytes = true;  // else plain numbers in `unit`
  std::string unit = "";
};
std::string RenderStackChart(const StackChart& chart);

// Horizontal bars, grouped by category: one row of bars per group, one bar per series.
struct BarSeries {
  std::string name;
  std::string colour;
  std::vector<double> values;  // bytes, one per group
};
struct BarChart {
  std::string title;
  double width = 540;  // as high as its bars
  std::vector<std::string> groups;
  std::vector<BarSeries> series;
};
std::string RenderBarChart(const BarChart& chart);

}  // namespace upipe::chart
