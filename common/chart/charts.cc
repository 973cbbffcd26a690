#include "tools/report/charts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/chart/svg.h"
#include "common/check.h"

namespace upipe::report {

using chart::Bytes;
using chart::ByteTicks;
using chart::Escape;
using chart::Fill;
using chart::Number;
using chart::PlainNumber;
using chart::Range;
using chart::RoundTicks;
using chart::Rule;
using chart::Scale;
using chart::Text;
using chart::WholeTicks;

namespace {

constexpr double kLeft = 58;
constexpr double kRight = 112;  // room for labels at the lines' ends
constexpr double kTop = 14;
constexpr double kBottom = 34;
constexpr double kCharacterWidth = 6.2;  // of axis text, about
constexpr double kLabelGap = 14;         // least distance of two labels

std::string Open(const std::string& title, Canvas canvas) {
  return absl::StrCat("<svg viewBox=\"0 0 ", Number(canvas.width), " ", Number(canvas.height),
                      "\" role=\"img\" aria-label=\"", Escape(title), "\">\n");
}

// Where the chart's numbers lie on its canvas.
struct Frame {
  Canvas canvas;
  Scale x;
  Scale y;
  double right() const { return canvas.width - kRight; }
  double bottom() const { return canvas.height - kBottom; }
};

Frame MakeFrame(Canvas canvas, Range x, Range y) {
  return {.canvas = canvas,
          .x = {.from = x, .to = {kLeft, canvas.width - kRight}},
          .y = {.from = y, .to = {canvas.height - kBottom, kTop}}};
}

// An invisible column that tells its numbers on hover.
std::string HoverColumn(const Frame& frame, double x, double width, const std::string& text) {
  return absl::StrCat("<rect class=\"hover\" x=\"", Number(x), "\" y=\"", Number(kTop),
                      "\" width=\"", Number(width), "\" height=\"", Number(frame.bottom() - kTop),
                      "\"><title>", Escape(text), "</title></rect>\n");
}

struct SideLabel {
  double y = 0;
  std::string text;
  std::string colour;
};

// Labels at the right end, moved apart until none covers another, top to bottom.
std::string SideLabels(const Frame& frame, std::vector<SideLabel> labels) {
  std::stable_sort(labels.begin(), labels.end(),
                   [](const auto& a, const auto& b) { return a.y < b.y; });
  for (size_t i = 1; i < labels.size(); ++i)
    labels[i].y = std::max(labels[i].y, labels[i - 1].y + kLabelGap);
  double limit = frame.bottom() + 8;
  for (auto label = labels.rbegin(); label != labels.rend(); ++label) {
    label->y = std::min(label->y, limit);
    limit = label->y - kLabelGap;
  }
  std::string out;
  for (const SideLabel& label : labels) {
    const double x = frame.right() + 10;
    absl::StrAppend(&out, "<rect x=\"", Number(x), "\" y=\"", Number(label.y - 4),
                    "\" width=\"8\" height=\"8\" rx=\"2\" ", Fill(label.colour), "/>\n",
                    Text(x + 13, label.y + 4, "start", label.text, "class=\"side\""));
  }
  return out;
}

std::string HorizontalGrid(const Frame& frame, const std::vector<double>& ticks,
                           const std::function<std::string(double)>& format) {
  std::string out;
  for (const double tick : ticks) {
    const double y = frame.y(tick);
    absl::StrAppend(&out, Rule(kLeft, y, frame.right(), y, "class=\"grid\""),
                    Text(kLeft - 8, y + 4, "end", format(tick)));
  }
  return out;
}

std::string Axis(const Frame& frame, const std::string& name, const std::vector<AxisTick>& ticks) {
  std::string out = Rule(kLeft, frame.bottom(), frame.right(), frame.bottom(), "class=\"axis\"");
  for (const AxisTick& tick : ticks) {
    absl::StrAppend(&out, Text(frame.x(tick.value), frame.bottom() + 18, "middle", tick.label));
  }
  return absl::StrCat(out, Text(frame.right() + 18, frame.bottom() + 18, "start", name));
}

std::vector<AxisTick> StepTicks(const Frame& frame) {
  std::vector<AxisTick> ticks;
  for (const double tick : WholeTicks(frame.x.from, 8)) ticks.push_back({tick, PlainNumber(tick)});
  return ticks;
}

Range XRange(const std::vector<LineSeries>& series) {
  Range range = {series[0].points[0].x, series[0].points[0].x};
  for (const LineSeries& line : series) {
    for (const Point& point : line.points) {
      range.low = std::min(range.low, point.x);
      range.high = std::max(range.high, point.x);
    }
  }
  if (range.high == range.low) range.high += 1;
  return range;
}

Range YRange(const LineChart& chart) {
  Range range = {chart.series[0].points[0].y, chart.series[0].points[0].y};
  const auto include = [&range](double value) {
    range.low = std::min(range.low, value);
    range.high = std::max(range.high, value);
  };
  for (const LineSeries& line : chart.series) {
    for (const Point& point : line.points) include(point.y);
  }
  for (const Level& level : chart.levels) include(level.value);
  if (chart.from_zero) include(0);
  const double pad = range.high == range.low ? 1 : 0.06 * (range.high - range.low);
  return {chart.from_zero ? range.low : range.low - pad, range.high + pad};
}

std::string RenderLine(const LineSeries& line, const Frame& frame) {
  std::string path;
  for (const Point& point : line.points) {
    absl::StrAppend(&path, path.empty() ? "M" : "L", Number(frame.x(point.x)), " ",
                    Number(frame.y(point.y)));
  }
  std::string out = absl::StrCat("<path class=\"line\" style=\"stroke:var(", line.colour,
                                 ")\" d=\"", path, "\"/>\n");
  if (!line.markers) return out;
  for (const Point& point : line.points) {
    absl::StrAppend(&out, "<circle class=\"marker\" cx=\"", Number(frame.x(point.x)), "\" cy=\"",
                    Number(frame.y(point.y)), "\" r=\"4.5\" ", Fill(line.colour), "/>\n");
  }
  return out;
}

// One hover column per x of the first series, telling every series that has a value there.
std::string LineHover(const LineChart& chart, const Frame& frame) {
  std::string columns;
  for (const AxisColumn& column : chart.axis_columns) {
    const double left = frame.x(column.from);
    absl::StrAppend(&columns, HoverColumn(frame, left, frame.x(column.to) - left, column.text));
  }
  if (!columns.empty()) return columns;
  const std::vector<Point>& points = chart.series[0].points;
  const double width = (frame.right() - kLeft) / static_cast<double>(points.size());
  std::string out;
  for (const Point& at : points) {
    std::string text = absl::StrCat("step ", PlainNumber(at.x));
    for (const LineSeries& line : chart.series) {
      for (const Point& point : line.points) {
        if (point.x != at.x) continue;
        absl::StrAppend(&text, "\n", line.name, " ", PlainNumber(point.y), " ", chart.unit);
      }
    }
    absl::StrAppend(&out, HoverColumn(frame, frame.x(at.x) - width / 2, width, text));
  }
  return out;
}

std::vector<double> Totals(const StackChart& chart) {
  std::vector<double> totals(chart.columns.size(), 0);
  for (const Band& band : chart.bands) {
    UPIPE_CHECK(band.bytes.size() == totals.size())
        << band.name << " has " << band.bytes.size() << " columns";
    for (size_t i = 0; i < totals.size(); ++i) totals[i] += band.bytes[i];
  }
  return totals;
}

// Columns are flat-topped, one unit wide: memory holds from one moment to the next.
std::string RenderBand(const Band& band, std::vector<double>& floor, const Frame& frame) {
  std::string top, bottom;
  for (size_t i = 0; i < floor.size(); ++i) {
    const double left = frame.x(static_cast<double>(i)),
                 right = frame.x(static_cast<double>(i) + 1);
    const std::string high = Number(frame.y(floor[i] + band.bytes[i])),
                      low = Number(frame.y(floor[i]));
    absl::StrAppend(&top, i == 0 ? "M" : "L", Number(left), " ", high, "L", Number(right), " ",
                    high);
    bottom = absl::StrCat("L", Number(right), " ", low, "L", Number(left), " ", low, bottom);
    floor[i] += band.bytes[i];
  }
  return absl::StrCat("<path class=\"band\" ", Fill(band.colour), " d=\"", top, bottom,
                      "Z\"><title>", Escape(band.name), "</title></path>\n");
}

std::string SectionAxis(const StackChart& chart, const Frame& frame) {
  const double y = frame.bottom();
  std::string out = Rule(kLeft, y, frame.right(), y, "class=\"axis\"");
  for (const Section& section : chart.sections) {
    const double left = frame.x(static_cast<double>(section.begin)),
                 right = frame.x(static_cast<double>(section.end));
    if (section.begin > 0)
      absl::StrAppend(&out, Rule(left, kTop, left, y + 6, "class=\"section\""));
    if (right - left < kCharacterWidth * static_cast<double>(section.name.size())) continue;
    absl::StrAppend(&out,
                    Text((left + right) / 2, y + 17, "middle", section.name, "class=\"small\""));
  }
  return out;
}

// The bands' names at the right, each as high as its band's middle in the column where it is
// largest.
std::string BandLabels(const StackChart& chart, const Frame& frame) {
  std::vector<double> floor(chart.columns.size(), 0);
  std::vector<SideLabel> labels;
  for (const Band& band : chart.bands) {
    const size_t at =
        chart.sections.empty()
            ? chart.columns.size() - 1
            : std::max_element(band.bytes.begin(), band.bytes.end()) - band.bytes.begin();
    labels.push_back({frame.y(floor[at] + band.bytes[at] / 2), band.name, band.colour});
    for (size_t i = 0; i < floor.size(); ++i) floor[i] += band.bytes[i];
  }
  return SideLabels(frame, std::move(labels));
}

std::string StackHover(const StackChart& chart, const std::vector<double>& totals,
                       const Frame& frame) {
  std::string out;
  for (size_t i = 0; i < totals.size(); ++i) {
    std::string text = absl::StrCat(chart.columns[i], "\ntotal ", Bytes(totals[i]));
    for (auto band = chart.bands.rbegin(); band != chart.bands.rend(); ++band) {
      if (band->bytes[i] > 0) absl::StrAppend(&text, "\n", band->name, " ", Bytes(band->bytes[i]));
    }
    const double left = frame.x(static_cast<double>(i));
    absl::StrAppend(&out,
                    HoverColumn(frame, left, frame.x(static_cast<double>(i) + 1) - left, text));
  }
  return out;
}

}  // namespace

std::string RenderLineChart(const LineChart& chart) {
  UPIPE_CHECK(!chart.series.empty() && !chart.series[0].points.empty()) << chart.title;
  const Frame frame = MakeFrame(chart.canvas, XRange(chart.series), YRange(chart));
  std::string out = absl::StrCat(
      Open(chart.title, chart.canvas),
      HorizontalGrid(frame, RoundTicks(frame.y.from, 6), chart.format),
      Axis(frame, chart.axis_name, chart.axis_ticks.empty() ? StepTicks(frame) : chart.axis_ticks));
  for (const AxisTick& tick : chart.axis_ticks) {
    absl::StrAppend(&out, Rule(frame.x(tick.value), kTop, frame.x(tick.value), frame.bottom() + 5,
                               "class=\"section\""));
  }
  std::vector<SideLabel> labels;
  for (const Level& level : chart.levels) {
    const double y = frame.y(level.value);
    absl::StrAppend(&out,
                    Rule(kLeft, y, frame.right(), y,
                         absl::StrCat("class=\"level\" style=\"stroke:var(", level.colour, ")\"")));
    labels.push_back({y, level.label, level.colour});
  }
  for (const LineSeries& line : chart.series) {
    if (line.points.empty()) continue;
    absl::StrAppend(&out, RenderLine(line, frame));
    labels.push_back({frame.y(line.points.back().y), line.name, line.colour});
  }
  absl::StrAppend(&out, SideLabels(frame, std::move(labels)), LineHover(chart, frame), "</svg>\n");
  return out;
}

std::string RenderStackChart(const StackChart& chart) {
  UPIPE_CHECK(!chart.columns.empty() && !chart.bands.empty()) << chart.title;
  const std::vector<double> totals = Totals(chart);
  double high =
      std::max(chart.planned_peak, *std::max_element(totals.begin(), totals.end())) * 1.08;
  high = std::max({high, chart.height_bytes, 1.0});
  const auto columns = static_cast<double>(totals.size());
  const Frame frame = MakeFrame(chart.canvas, {0, columns}, {0, high});
  std::string out = absl::StrCat(Open(chart.title, chart.canvas),
                                 HorizontalGrid(frame, ByteTicks(frame.y.from, 8), Bytes));
  std::vector<double> floor(totals.size(), 0);
  for (const Band& band : chart.bands) absl::StrAppend(&out, RenderBand(band, floor, frame));
  if (chart.planned_peak > 0) {
    const double y = frame.y(chart.planned_peak);
    absl::StrAppend(&out,
                    Rule(kLeft, y, frame.right(), y, "class=\"level\" style=\"stroke:var(--ink)\""),
                    Text(kLeft + 6, y - 5, "start",
                         absl::StrCat(chart.planned_label, " ", Bytes(chart.planned_peak)),
                         "class=\"strong\""));
  }
  if (chart.sections.empty()) {
    Frame steps = frame;
    steps.x.from = {0.5, columns + 0.5};
    absl::StrAppend(&out, Axis(steps, "step", StepTicks(steps)));
  } else {
    absl::StrAppend(&out, SectionAxis(chart, frame));
  }
  absl::StrAppend(&out, BandLabels(chart, frame), StackHover(chart, totals, frame), "</svg>\n");
  return out;
}

std::string RenderBarChart(const BarChart& chart) {
  UPIPE_CHECK(!chart.groups.empty() && !chart.series.empty()) << chart.title;
  constexpr double kBar = 13, kGap = 2, kGroupGap = 16, kNames = 108, kValues = 70;
  double most = 1;
  for (const BarSeries& series : chart.series) {
    most = std::max(most, *std::max_element(series.bytes.begin(), series.bytes.end()));
  }
  const double group = static_cast<double>(chart.series.size()) * (kBar + kGap) + kGroupGap;
  const double height = 8 + group * static_cast<double>(chart.groups.size());
  const Scale x = {.from = {0, most}, .to = {kNames, chart.width - kValues}};
  std::string out = Open(chart.title, {chart.width, height});
  for (size_t g = 0; g < chart.groups.size(); ++g) {
    double y = 8 + group * static_cast<double>(g);
    absl::StrAppend(&out, Text(kNames - 10, y + (group - kGroupGap) / 2 + 3, "end", chart.groups[g],
                               "class=\"strong\""));
    for (const BarSeries& series : chart.series) {
      const double end = x(series.bytes[g]);
      absl::StrAppend(
          &out, "<rect x=\"", Number(kNames), "\" y=\"", Number(y), "\" width=\"",
          Number(std::max(end - kNames, 1.0)), "\" height=\"", Number(kBar), "\" rx=\"2\" ",
          Fill(series.colour), "><title>", Escape(chart.groups[g]), ", ", Escape(series.name), ": ",
          Bytes(series.bytes[g]), "</title></rect>\n",
          Text(end + 6, y + kBar - 2.5, "start", Bytes(series.bytes[g]), "class=\"small\""));
      y += kBar + kGap;
    }
  }
  return absl::StrCat(out, "</svg>\n");
}

}  // namespace upipe::report
