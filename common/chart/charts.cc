#include "common/chart/charts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/chart/svg.h"
#include "common/check.h"

namespace upipe::chart {

namespace {

constexpr double kLeft = 58;
constexpr double kRight = 112;  // room for labels at the lines' ends
constexpr double kTop = 14;
constexpr double kBottom = 34;
constexpr double kCompactLeft = 52;
constexpr double kCompactRight = 10;
constexpr double kCompactBottom = 44;    // the axis's name lies below its ticks
constexpr double kCharacterWidth = 6.2;  // of axis text, about
constexpr double kLabelGap = 14;         // least distance of two labels
constexpr size_t kColumnsWithEdges = 100;

// What is no number, or so large that an axis could not hold it, leaves a gap.
bool IsDrawn(double value) { return std::abs(value) < 1e30; }

std::string Open(const std::string& title, Canvas canvas) {
  return absl::StrCat("<svg viewBox=\"0 0 ", Number(canvas.width), " ", Number(canvas.height),
                      "\" role=\"img\" aria-label=\"", Escape(title), "\">\n");
}

// Where the chart's numbers lie on its canvas.
struct Frame {
  Canvas canvas;
  Scale x;
  Scale y;
  double left() const { return canvas.compact ? kCompactLeft : kLeft; }
  double right() const { return canvas.width - (canvas.compact ? kCompactRight : kRight); }
  double bottom() const { return canvas.height - (canvas.compact ? kCompactBottom : kBottom); }
};

Frame MakeFrame(Canvas canvas, Range x, Range y) {
  Frame frame = {.canvas = canvas};
  frame.x = {.from = x, .to = {frame.left(), frame.right()}};
  frame.y = {.from = y, .to = {frame.bottom(), kTop}};
  return frame;
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
  if (frame.canvas.compact) return "";
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
    absl::StrAppend(&out, Rule(frame.left(), y, frame.right(), y, "class=\"grid\""),
                    Text(frame.left() - 8, y + 4, "end", format(tick)));
  }
  return out;
}

std::string Axis(const Frame& frame, const std::string& name, const std::vector<AxisTick>& ticks) {
  std::string out =
      Rule(frame.left(), frame.bottom(), frame.right(), frame.bottom(), "class=\"axis\"");
  double free_from = 0;
  for (const AxisTick& tick : ticks) {
    const double x = frame.x(tick.value);
    const double half = kCharacterWidth * static_cast<double>(tick.label.size()) / 2;
    if (frame.canvas.compact && x - half < free_from) continue;  // would cover the one before
    free_from = x + half + kCharacterWidth;
    const bool outside = frame.canvas.compact && x + half > frame.canvas.width;
    absl::StrAppend(&out, Text(outside ? frame.right() : x, frame.bottom() + 18,
                               outside ? "end" : "middle", tick.label));
  }
  if (frame.canvas.compact) {
    return absl::StrCat(out, Text(frame.right(), frame.bottom() + 36, "end", name));
  }
  return absl::StrCat(out, Text(frame.right() + 18, frame.bottom() + 18, "start", name));
}

std::vector<AxisTick> StepTicks(const Frame& frame) {
  std::vector<AxisTick> ticks;
  for (const double tick : WholeTicks(frame.x.from, frame.canvas.compact ? 4 : 8)) {
    ticks.push_back({tick, PlainNumber(tick)});
  }
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
  if (range.high == range.low) range.high += std::max(1.0, 1e-6 * std::abs(range.high));
  return range;
}

Range YRange(const LineChart& chart) {
  Range range = {0, 0};
  bool empty = true;
  const auto include = [&](double value) {
    if (!IsDrawn(value)) return;
    range = empty ? Range{value, value}
                  : Range{std::min(range.low, value), std::max(range.high, value)};
    empty = false;
  };
  for (const LineSeries& line : chart.series) {
    for (const Point& point : line.points) include(point.y);
  }
  for (const Level& level : chart.levels) include(level.value);
  if (chart.from_zero) include(0);
  const double pad = range.high == range.low ? std::max(1.0, 0.06 * std::abs(range.high))
                                             : 0.06 * (range.high - range.low);
  return {chart.from_zero ? range.low : range.low - pad, range.high + pad};
}

std::string RenderLine(const LineSeries& line, const Frame& frame) {
  std::string path;
  bool pen_up = true;
  for (const Point& point : line.points) {
    const bool drawn = IsDrawn(point.y);
    if (drawn) {
      absl::StrAppend(&path, pen_up ? "M" : "L", Number(frame.x(point.x)), " ",
                      Number(frame.y(point.y)));
    }
    pen_up = !drawn;
  }
  std::string out = absl::StrCat("<path class=\"line\" style=\"stroke:var(", line.colour,
                                 ")\" d=\"", path, "\"/>\n");
  if (!line.markers) return out;
  for (const Point& point : line.points) {
    if (!IsDrawn(point.y)) continue;
    absl::StrAppend(&out, "<circle class=\"marker\" cx=\"", Number(frame.x(point.x)), "\" cy=\"",
                    Number(frame.y(point.y)), "\" r=\"4.5\" ", Fill(line.colour), "/>\n");
  }
  return out;
}

std::string Marks(const LineChart& chart, const Frame& frame) {
  std::string out;
  double free_from = 0;
  for (const AxisMark& mark : chart.marks) {
    const double x = frame.x(mark.value);
    if (x < frame.left() || x > frame.right()) continue;
    absl::StrAppend(&out, "<g><title>", Escape(mark.label), "</title>",
                    Rule(x, kTop, x, frame.bottom(), "class=\"section\""), "</g>");
    const double width = kCharacterWidth * static_cast<double>(mark.label.size());
    if (x < free_from || x + 4 + width > frame.canvas.width) continue;
    absl::StrAppend(&out, Text(x + 4, kTop + 9, "start", mark.label, "class=\"small\""));
    free_from = x + 4 + width;
  }
  return out;
}

// One hover column per x of the first series, telling every series that has a value there.
std::string LineHover(const LineChart& chart, const Frame& frame) {
  if (frame.canvas.compact) return "";
  std::string columns;
  for (const AxisColumn& column : chart.axis_columns) {
    const double left = frame.x(column.from);
    absl::StrAppend(&columns, HoverColumn(frame, left, frame.x(column.to) - left, column.text));
  }
  if (!columns.empty()) return columns;
  const std::vector<Point>& points = chart.series[0].points;
  const double width = (frame.right() - frame.left()) / static_cast<double>(points.size());
  std::string out;
  std::vector<size_t> next(chart.series.size(), 0);  // in each series, all ascending
  for (const Point& at : points) {
    std::string text = absl::StrCat("step ", PlainNumber(at.x));
    for (size_t i = 0; i < chart.series.size(); ++i) {
      const std::vector<Point>& line = chart.series[i].points;
      while (next[i] < line.size() && line[next[i]].x < at.x) ++next[i];
      if (next[i] == line.size() || line[next[i]].x != at.x) continue;
      absl::StrAppend(&text, "\n", chart.series[i].name, " ", PlainNumber(line[next[i]].y), " ",
                      chart.unit);
    }
    absl::StrAppend(&out, HoverColumn(frame, frame.x(at.x) - width / 2, width, text));
  }
  return out;
}

std::string Amount(const StackChart& chart, double value) {
  return chart.in_bytes ? Bytes(value) : absl::StrCat(PlainNumber(value), chart.unit);
}

std::vector<double> Totals(const StackChart& chart) {
  std::vector<double> totals(chart.columns.size(), 0);
  for (const Band& band : chart.bands) {
    UPIPE_CHECK(band.values.size() == totals.size())
        << band.name << " has " << band.values.size() << " columns";
    for (size_t i = 0; i < totals.size(); ++i) {
      UPIPE_CHECK(IsDrawn(band.values[i])) << band.name << " has " << band.values[i];
      totals[i] += band.values[i];
    }
  }
  return totals;
}

// Columns are flat-topped, one unit wide: memory holds from one moment to the next.
std::string RenderBand(const Band& band, std::vector<double>& floor, const Frame& frame) {
  std::string top, bottom;
  for (size_t i = 0; i < floor.size(); ++i) {
    const double left = frame.x(static_cast<double>(i)),
                 right = frame.x(static_cast<double>(i) + 1);
    const std::string high = Number(frame.y(floor[i] + band.values[i])),
                      low = Number(frame.y(floor[i]));
    absl::StrAppend(&top, i == 0 ? "M" : "L", Number(left), " ", high, "L", Number(right), " ",
                    high);
    bottom = absl::StrCat("L", Number(right), " ", low, "L", Number(left), " ", low, bottom);
    floor[i] += band.values[i];
  }
  // Edges of many narrow columns would cover the colours.
  const char* edge = floor.size() > kColumnsWithEdges ? "band dense" : "band";
  return absl::StrCat("<path class=\"", edge, "\" ", Fill(band.colour), " d=\"", top, bottom,
                      "Z\"><title>", Escape(band.name), "</title></path>\n");
}

std::string SectionAxis(const StackChart& chart, const Frame& frame) {
  const double y = frame.bottom();
  std::string out = Rule(frame.left(), y, frame.right(), y, "class=\"axis\"");
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
            : std::max_element(band.values.begin(), band.values.end()) - band.values.begin();
    labels.push_back({frame.y(floor[at] + band.values[at] / 2), band.name, band.colour});
    for (size_t i = 0; i < floor.size(); ++i) floor[i] += band.values[i];
  }
  return SideLabels(frame, std::move(labels));
}

std::string StackHover(const StackChart& chart, const std::vector<double>& totals,
                       const Frame& frame) {
  std::string out;
  if (frame.canvas.compact) return out;
  for (size_t i = 0; i < totals.size(); ++i) {
    std::string text = absl::StrCat(chart.columns[i], "\ntotal ", Amount(chart, totals[i]));
    for (auto band = chart.bands.rbegin(); band != chart.bands.rend(); ++band) {
      if (band->values[i] > 0) {
        absl::StrAppend(&text, "\n", band->name, " ", Amount(chart, band->values[i]));
      }
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
  absl::StrAppend(&out, Marks(chart, frame));
  std::vector<SideLabel> labels;
  for (const Level& level : chart.levels) {
    if (!IsDrawn(level.value)) continue;
    const double y = frame.y(level.value);
    absl::StrAppend(&out,
                    Rule(frame.left(), y, frame.right(), y,
                         absl::StrCat("class=\"level\" style=\"stroke:var(", level.colour, ")\"")));
    labels.push_back({y, level.label, level.colour});
  }
  for (const LineSeries& line : chart.series) {
    const auto last = std::find_if(line.points.rbegin(), line.points.rend(),
                                   [](const Point& point) { return IsDrawn(point.y); });
    if (last == line.points.rend()) continue;
    absl::StrAppend(&out, RenderLine(line, frame));
    labels.push_back({frame.y(last->y), line.name, line.colour});
  }
  absl::StrAppend(&out, SideLabels(frame, std::move(labels)), LineHover(chart, frame), "</svg>\n");
  return out;
}

std::vector<Point> Thin(const std::vector<Point>& points, size_t buckets) {
  UPIPE_CHECK(buckets > 0) << "points for nobody";
  if (points.size() <= 2 * buckets) return points;
  std::vector<Point> thin = {points.front()};
  const size_t inner = points.size() - 2;
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    const size_t begin = 1 + bucket * inner / buckets, end = 1 + (bucket + 1) * inner / buckets;
    size_t low = begin, high = begin;
    bool gap = false;
    for (size_t i = begin; i < end; ++i) {
      gap = gap || !IsDrawn(points[i].y);
      if (!IsDrawn(points[low].y) || points[i].y < points[low].y) low = i;
      if (!IsDrawn(points[high].y) || points[i].y > points[high].y) high = i;
    }
    thin.push_back(points[std::min(low, high)]);
    // A stretch with what is no number keeps one of them.
    if (gap) thin.push_back({points[std::min(low, high)].x, std::nan("")});
    if (low != high) thin.push_back(points[std::max(low, high)]);
  }
  thin.push_back(points.back());
  return thin;
}

std::string RenderStackChart(const StackChart& chart) {
  UPIPE_CHECK(!chart.columns.empty() && !chart.bands.empty()) << chart.title;
  const std::vector<double> totals = Totals(chart);
  double high =
      std::max({chart.planned_peak, chart.limit, *std::max_element(totals.begin(), totals.end())});
  high = std::max({high * 1.08, chart.height, chart.in_bytes ? 1.0 : 1e-9});
  const auto columns = static_cast<double>(totals.size());
  const Frame frame = MakeFrame(chart.canvas, {0, columns}, {0, high});
  const int ticks = chart.canvas.compact ? 5 : 8;
  std::string out = absl::StrCat(
      Open(chart.title, chart.canvas),
      HorizontalGrid(
          frame, chart.in_bytes ? ByteTicks(frame.y.from, ticks) : RoundTicks(frame.y.from, ticks),
          [&chart](double value) {
            const std::string amount = Amount(chart, value);
            return chart.canvas.compact ? absl::StrReplaceAll(amount, {{".0 ", " "}}) : amount;
          }));
  std::vector<double> floor(totals.size(), 0);
  for (const Band& band : chart.bands) absl::StrAppend(&out, RenderBand(band, floor, frame));
  const auto level = [&](double value, const std::string& name, const char* colour) {
    if (value <= 0) return;
    const double y = frame.y(value);
    absl::StrAppend(&out,
                    Rule(frame.left(), y, frame.right(), y,
                         absl::StrCat("class=\"level\" style=\"stroke:var(", colour, ")\"")),
                    Text(frame.left() + 6, y - 5, "start",
                         absl::StrCat(name, " ", Amount(chart, value)), "class=\"strong rim\""));
  };
  level(chart.planned_peak, chart.planned_label, "--ink");
  level(chart.limit, "limit", "--bad");
  if (chart.sections.empty()) {
    Frame steps = frame;
    steps.x.from = {0.5, columns + 0.5};
    if (chart.steps.high > chart.steps.low) {
      const double half = (chart.steps.high - chart.steps.low) / (columns - 1) / 2;
      steps.x.from = {chart.steps.low - half, chart.steps.high + half};
    }
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
    most = std::max(most, *std::max_element(series.values.begin(), series.values.end()));
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
      const double end = x(series.values[g]);
      absl::StrAppend(
          &out, "<rect x=\"", Number(kNames), "\" y=\"", Number(y), "\" width=\"",
          Number(std::max(end - kNames, 1.0)), "\" height=\"", Number(kBar), "\" rx=\"2\" ",
          Fill(series.colour), "><title>", Escape(chart.groups[g]), ", ", Escape(series.name), ": ",
          Bytes(series.values[g]), "</title></rect>\n",
          Text(end + 6, y + kBar - 2.5, "start", Bytes(series.values[g]), "class=\"small\""));
      y += kBar + kGap;
    }
  }
  return absl::StrCat(out, "</svg>\n");
}

}  // namespace upipe::chart
