#include "common/report/position_chart.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/units.h"

namespace upipe::report {
namespace {

constexpr int64_t kFirstRange = 4096;  // tokens
constexpr size_t kMostEvaluations = 4;

PositionCurve CurveOf(std::string name, std::string colour, const Positions& positions) {
  return {std::move(name), std::move(colour), {positions.begin(), positions.end()}};
}

// At most kMostEvaluations of `evaluations`, the first and the last always.
std::vector<const v1::StepReport*> Thin(const std::vector<const v1::StepReport*>& evaluations) {
  if (evaluations.size() <= kMostEvaluations) return evaluations;
  std::vector<const v1::StepReport*> kept;
  for (size_t i = 0; i < kMostEvaluations; ++i) {
    kept.push_back(evaluations[i * (evaluations.size() - 1) / (kMostEvaluations - 1)]);
  }
  return kept;
}

// Every token of the steps weighs the same. A step whose loss is no number is left out.
std::vector<v1::PositionLoss> MeanOf(const std::vector<v1::StepReport>& reports, size_t first) {
  std::map<int64_t, v1::PositionLoss> by_begin;  // `loss` holds the sum
  for (size_t i = first; i < reports.size(); ++i) {
    for (const v1::PositionLoss& range : reports[i].loss_by_position()) {
      if (!std::isfinite(range.loss())) continue;
      v1::PositionLoss& sum = by_begin[range.begin()];
      sum.set_begin(range.begin());
      sum.set_end(range.end());
      sum.set_loss(sum.loss() + range.loss() * static_cast<double>(range.tokens()));
      sum.set_tokens(sum.tokens() + range.tokens());
    }
  }
  std::vector<v1::PositionLoss> mean;
  for (auto& [begin, range] : by_begin) {
    if (range.tokens() == 0) continue;
    range.set_loss(range.loss() / static_cast<double>(range.tokens()));
    mean.push_back(range);
  }
  return mean;
}

std::string RangeName(const v1::PositionLoss& range) {
  return absl::StrCat("positions ", FormatTokenCount(range.begin()), " to ",
                      FormatTokenCount(range.end()));
}

}  // namespace

std::vector<PositionCurve> PositionCurves(const std::vector<v1::StepReport>& reports) {
  std::vector<const v1::StepReport*> evaluations;
  for (const v1::StepReport& report : reports) {
    if (report.held_out_loss_by_position_size() > 0) evaluations.push_back(&report);
  }
  evaluations = Thin(evaluations);
  std::vector<PositionCurve> curves;
  for (size_t i = 0; i < evaluations.size(); ++i) {
    // Later evaluations are stronger; the last has the held-out loss's own colour.
    const size_t shade = kMostEvaluations - evaluations.size() + i + 1;
    curves.push_back(CurveOf(absl::StrCat("step ", evaluations[i]->step()),
                             absl::StrCat("--evaluation-", shade),
                             evaluations[i]->held_out_loss_by_position()));
  }
  const size_t last_tenth = reports.size() - (reports.size() + 9) / 10;
  std::vector<v1::PositionLoss> training = MeanOf(reports, last_tenth);
  if (!training.empty()) curves.push_back({"training", "--train", std::move(training)});
  return curves;
}

double PositionOnAxis(int64_t position) {
  if (position <= 0) return 0;
  // A context shorter than the first range fills it.
  return 1 + std::max(0.0, std::log2(static_cast<double>(position) / kFirstRange) / 2);
}

std::string RenderPositionChart(const std::vector<PositionCurve>& curves, chart::Canvas canvas) {
  UPIPE_CHECK(!curves.empty());
  chart::LineChart chart = {
      .title = "Loss by position in the sequence", .canvas = canvas, .unit = "nats"};
  chart.axis_name = "position";
  std::set<int64_t> edges;
  std::map<int64_t, chart::AxisColumn> columns;
  for (const PositionCurve& curve : curves) {
    chart::LineSeries line = {.name = curve.name, .colour = curve.colour};
    for (const v1::PositionLoss& range : curve.ranges) {
      const double begin = PositionOnAxis(range.begin()), end = PositionOnAxis(range.end());
      edges.insert({range.begin(), range.end()});
      chart::AxisColumn& column = columns[range.begin()];
      column.from = begin;
      column.to = end;
      if (column.text.empty()) column.text = RangeName(range);
      if (!std::isfinite(range.loss())) continue;
      line.points.push_back({begin, range.loss()});
      line.points.push_back({end, range.loss()});
      absl::StrAppendFormat(&column.text, "\n%s %.4f nats", curve.name, range.loss());
    }
    if (!line.points.empty()) chart.series.push_back(std::move(line));
  }
  if (chart.series.empty()) return "";
  for (const int64_t edge : edges) {
    chart.axis_ticks.push_back({PositionOnAxis(edge), FormatTokenCount(edge)});
  }
  for (auto& [begin, column] : columns) chart.axis_columns.push_back(std::move(column));
  return chart::RenderLineChart(chart);
}

}  // namespace upipe::report
