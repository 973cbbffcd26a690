// Loss by position in the sequence: the first picture to look at of any long-context run, because
// it shows whether what lies far back helps at all. Pure.
#pragma once

#include <string>
#include <vector>

#include "common/chart/charts.h"
#include "upipe/v1/report.pb.h"

namespace upipe::report {

using Positions = google::protobuf::RepeatedPtrField<v1::PositionLoss>;

// One line of the chart: the loss of every range, ascending, each where `ranges` says.
struct PositionCurve {
  std::string name;
  std::string colour;
  std::vector<v1::PositionLoss> ranges;
};

// Held-out losses at the first evaluation, the last and at most two between, and the training loss
// over the last tenth of the steps. Empty when the reports hold none.
std::vector<PositionCurve> PositionCurves(const std::vector<v1::StepReport>& reports);

// Where a position lies on the chart's logarithmic axis: 0 at the sequence's begin, 1 at 4K, 2 at
// 16K, one more for every factor of four.
double PositionOnAxis(int64_t position);

// At least one curve.
std::string RenderPositionChart(const std::vector<PositionCurve>& curves, chart::Canvas canvas);

}  // namespace upipe::report
