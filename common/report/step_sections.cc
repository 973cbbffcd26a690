#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/chart/svg.h"
#include "common/report/page_parts.h"
#include "common/report/position_chart.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Canvas;
using chart::Escape;
using chart::LineChart;
using chart::LineSeries;
using chart::ShortNumber;

namespace {

constexpr size_t kBuckets = 180;  // of a line
constexpr size_t kMostColumns = 180;
constexpr size_t kStepsNamed = 8;  // in a sentence

// The stages in the order of a step, bottom of the stack first.
constexpr const char* kStages[] = {"attention", "exchange",  "return",    "projection",
                                   "mlp",       "loss",      "embedding", "weights",
                                   "gradients", "optimizer", "offload"};

LineSeries SeriesOf(const JobRecord& record, std::string name, std::string colour,
                    double StepPoint::*value) {
  LineSeries line = {.name = std::move(name), .colour = std::move(colour)};
  for (const StepPoint& point : record.steps.points()) {
    line.points.push_back({static_cast<double>(point.step), point.*value});
  }
  line.points = chart::Thin(line.points, kBuckets);
  return line;
}

bool AnyFinite(const LineSeries& line) {
  return std::any_of(line.points.begin(), line.points.end(),
                     [](const chart::Point& point) { return std::isfinite(point.y); });
}

// Where attempts ended before the job went on.
std::vector<chart::AxisMark> Restarts(const JobRecord& record) {
  std::vector<chart::AxisMark> marks;
  for (const v1::AttemptSummary& attempt : record.job.attempts()) {
    if (attempt.generation() == record.job.generation() || attempt.last_step() == 0) continue;
    marks.push_back({static_cast<double>(attempt.last_step()),
                     absl::StrCat("generation ", attempt.generation(), " ended")});
  }
  return marks;
}

std::string Figure(LineChart chart, double width, double height) {
  ColourKey key;
  for (const LineSeries& line : chart.series) key.emplace_back(line.name, line.colour);
  for (const chart::Level& level : chart.levels) key.emplace_back(level.label, level.colour);
  return RenderFigure(
      [&chart](Canvas canvas) {
        chart.canvas = canvas;
        return RenderLineChart(chart);
      },
      {.width = width, .height = height}, key);
}

// "steps 3, 4, 5 and 17 more", or "".
std::string StepsWhere(const JobRecord& record, bool (*is)(const StepPoint&)) {
  std::vector<std::string> steps;
  size_t count = 0;
  for (const StepPoint& point : record.steps.points()) {
    if (!is(point)) continue;
    if (++count <= kStepsNamed) steps.push_back(absl::StrCat(point.step));
  }
  if (count == 0) return "";
  return absl::StrCat(count == 1 ? "step " : "steps ", absl::StrJoin(steps, ", "),
                      count > steps.size()
                          ? absl::StrCat(" and ", FormatCount(count - steps.size()), " more")
                          : "");
}

std::string Warning(const std::string& what, const std::string& steps) {
  return steps.empty() ? "" : absl::StrCat("<p class=\"bad\">", what, ": ", steps, ".</p>\n");
}

// Seconds as they can be: what is no number, or none that a step takes, counts as none.
double Possible(double seconds) { return seconds > 0 && seconds < 1e9 ? seconds : 0; }

// Mean seconds of a stage over a column's steps.
double MeanSeconds(const std::vector<const v1::StepReport*>& column, const std::string& stage) {
  double sum = 0;
  for (const v1::StepReport* report : column) {
    for (const v1::StageSeconds& part : report->stages()) {
      if (part.stage() == stage) sum += Possible(part.seconds());
    }
  }
  return sum / static_cast<double>(column.size());
}

using PartOf = double (*)(const v1::StepReport&);

double Mean(const std::vector<const v1::StepReport*>& column, PartOf part) {
  double sum = 0;
  for (const v1::StepReport* report : column) sum += Possible(part(*report));
  return sum / static_cast<double>(column.size());
}

// The stages there are, known ones in order, others behind them.
std::vector<std::string> StagesIn(const std::vector<v1::StepReport>& samples) {
  std::vector<std::string> stages(std::begin(kStages), std::end(kStages));
  std::map<std::string, bool> there;
  for (const v1::StepReport& report : samples) {
    for (const v1::StageSeconds& part : report.stages()) there[part.stage()] = true;
  }
  for (const auto& [stage, is] : there) {
    if (std::find(stages.begin(), stages.end(), stage) == stages.end()) stages.push_back(stage);
  }
  std::erase_if(stages, [&there](const std::string& stage) { return !there.contains(stage); });
  return stages;
}

// Where no stages were told: what a rank did itself, and what it waited for.
std::vector<chart::Band> CoarseBands(const StepColumns& columns) {
  struct Part {
    const char* name;
    const char* colour;
    PartOf seconds;
  };
  const Part parts[] = {{"own work", "--train",
                         [](const v1::StepReport& it) {
                           return std::max(
                               0.0, it.step_seconds() - it.comm_seconds() - it.data_seconds());
                         }},
                        {"collectives", "--stage-exchange",
                         [](const v1::StepReport& it) { return it.comm_seconds(); }},
                        {"data wait", "--stage-waiting",
                         [](const v1::StepReport& it) { return it.data_seconds(); }}};
  std::vector<chart::Band> bands;
  for (const Part& part : parts) {
    chart::Band band = {.name = part.name, .colour = part.colour, .values = {}};
    for (const auto& column : columns.columns) band.values.push_back(Mean(column, part.seconds));
    bands.push_back(std::move(band));
  }
  return bands;
}

std::vector<chart::Band> StageBands(const StepColumns& columns,
                                    const std::vector<std::string>& stages) {
  std::vector<chart::Band> bands;
  for (const std::string& stage : stages) {
    chart::Band band = {.name = stage, .colour = StageColour(stage), .values = {}};
    for (const auto& column : columns.columns) band.values.push_back(MeanSeconds(column, stage));
    bands.push_back(std::move(band));
  }
  return bands;
}

// What the bands show, in digits: the last step.
std::string StageTable(const v1::StepReport& last) {
  std::vector<std::vector<std::string>> rows = {{"stage", "seconds", "share of the step"}};
  for (const v1::StageSeconds& part : last.stages()) {
    rows.push_back({part.stage(), Seconds(part.seconds()),
                    absl::StrFormat("%.1f %%", 100 * part.seconds() / last.step_seconds())});
  }
  if (rows.size() == 1) return "";
  rows.push_back({"the step", Seconds(last.step_seconds()), "100 %"});
  return RenderGrid(rows, 1);
}

// What the picture shows, in digits: a fall of a hundredth is no visible one.
std::string PositionTable(const std::vector<PositionCurve>& curves) {
  const auto most = std::max_element(
      curves.begin(), curves.end(),
      [](const auto& a, const auto& b) { return a.ranges.size() < b.ranges.size(); });
  std::vector<std::vector<std::string>> rows = {{""}};
  for (const v1::PositionLoss& range : most->ranges) {
    rows[0].push_back(
        absl::StrCat(FormatTokenCount(range.begin()), " to ", FormatTokenCount(range.end())));
  }
  rows[0].push_back("last less first");
  for (const PositionCurve& curve : curves) {
    std::vector<std::string>& row = rows.emplace_back(1, curve.name);
    for (const v1::PositionLoss& column : most->ranges) {
      const auto range = std::find_if(
          curve.ranges.begin(), curve.ranges.end(),
          [&column](const v1::PositionLoss& it) { return it.begin() == column.begin(); });
      row.push_back(range == curve.ranges.end() ? "-" : absl::StrFormat("%.4f", range->loss()));
    }
    row.push_back(
        absl::StrFormat("%+.4f", curve.ranges.back().loss() - curve.ranges.front().loss()));
  }
  return RenderGrid(rows, 1);
}

}  // namespace

std::string StageColour(const std::string& stage) {
  for (const char* known : kStages) {
    if (stage == known) return absl::StrCat("--stage-", stage);
  }
  return "--stage-other";
}

StepColumns ColumnsOf(const std::vector<v1::StepReport>& samples) {
  StepColumns out;
  const size_t count = std::min(samples.size(), kMostColumns);
  for (size_t i = 0; i < count; ++i) {
    const size_t begin = i * samples.size() / count, end = (i + 1) * samples.size() / count;
    std::vector<const v1::StepReport*>& column = out.columns.emplace_back();
    for (size_t s = begin; s < end; ++s) column.push_back(&samples[s]);
    const int64_t first = samples[begin].step(), last = samples[end - 1].step();
    out.titles.push_back(first == last ? absl::StrCat("step ", first)
                                       : absl::StrCat("steps ", first, " to ", last));
  }
  out.steps = {static_cast<double>(samples.front().step()),
               static_cast<double>(samples.back().step())};
  return out;
}

std::string LossSection(const JobRecord& record, const std::vector<chart::Level>& levels,
                        const std::string& words) {
  LineChart chart = {.title = "Training and held-out loss by step", .unit = "nats"};
  LineSeries train = SeriesOf(record, "training", "--train", &StepPoint::loss);
  LineSeries held_out = {.name = "held out", .colour = "--held-out"};
  for (const StepPoint& point : record.steps.points()) {
    if (!point.held_out) continue;
    held_out.points.push_back({static_cast<double>(point.step), *point.held_out});
  }
  held_out.points = chart::Thin(held_out.points, kBuckets / 2);
  held_out.markers = held_out.points.size() <= 24;
  const std::string warning =
      Warning("The loss was no finite number at",
              StepsWhere(record, [](const StepPoint& it) { return !std::isfinite(it.loss); }));
  const bool drawn = AnyFinite(train);
  chart.series = {std::move(train)};
  if (AnyFinite(held_out)) chart.series.push_back(std::move(held_out));
  chart.levels = levels;
  chart.marks = Restarts(record);
  return RenderCard(
      {"loss", "Loss", words.empty() ? "Mean over the tokens of a step, nats." : words,
       absl::StrCat(warning, drawn ? Figure(std::move(chart), kCardWidth, 300) : "")});
}

std::string ThroughputSection(const JobRecord& record) {
  LineChart chart = {.title = "Tokens per second by step",
                     .from_zero = true,
                     .unit = "tokens/s",
                     .format = ShortNumber};
  std::vector<double> rates;
  for (const StepPoint& point : record.steps.points()) rates.push_back(point.tokens_per_second);
  const double median = Median(rates);
  chart.series = {SeriesOf(record, "all ranks", "--rate", &StepPoint::tokens_per_second)};
  chart.levels = {{median, absl::StrCat("median ", ShortNumber(median)), "--unigram"}};
  chart.marks = Restarts(record);
  return RenderCard({"throughput", "Throughput",
                     "Tokens per second of all ranks together, exchanges included.",
                     Figure(std::move(chart), kCardWidth, 300)});
}

std::string MfuSection(const JobRecord& record) {
  const v1::RunPlan& plan = record.job.plan();
  if (!(plan.peak_flops() > 0)) return "";
  LineChart chart = {
      .title = "Share of the devices' peak by step", .from_zero = true, .format = [](double value) {
        return absl::StrCat(chart::PlainNumber(value), " %");
      }};
  LineSeries line = {.name = "causal MFU", .colour = "--train"};
  for (const StepPoint& point : record.steps.points()) {
    line.points.push_back(
        {static_cast<double>(point.step), 100 * CausalMfu(plan, point.step_seconds)});
  }
  line.points = chart::Thin(line.points, kBuckets);
  chart.series = {std::move(line)};
  return RenderCard(
      {"mfu", "Model FLOPs utilisation",
       absl::StrFormat(
           "The model's %.3g TFLOP a step (causal, without recomputation) against %s of "
           "%.3g TFLOP/s each.",
           plan.model_flops() / 1e12,
           plan.ranks_size() == 1 ? "one device" : absl::StrCat(plan.ranks_size(), " devices"),
           plan.peak_flops() / 1e12),
       Figure(std::move(chart), kCardWidth, 260)});
}

std::string GradientSection(const JobRecord& record) {
  LineChart chart = {.title = "Gradient norm by step", .from_zero = true};
  LineSeries line = SeriesOf(record, "before clipping", "--bigram", &StepPoint::grad_norm);
  const std::string warning =
      Warning("The update was left out at",
              StepsWhere(record, [](const StepPoint& it) { return it.skipped; }));
  const bool drawn = AnyFinite(line);
  chart.series = {std::move(line)};
  const double clip = record.job.plan().spec().optimizer().clip_norm();
  if (clip > 0) {
    chart.levels = {{clip, absl::StrCat("clip ", chart::PlainNumber(clip)), "--unigram"}};
  }
  chart.marks = Restarts(record);
  return RenderCard(
      {"gradients", "Gradient norm", "Of all gradients together, before clipping.",
       absl::StrCat(warning, drawn ? Figure(std::move(chart), kCardWidth, 260) : "")});
}

std::string StepTimeSection(const JobRecord& record) {
  const std::vector<v1::StepReport> samples = record.steps.Samples();
  const StepColumns columns = ColumnsOf(samples);
  const std::vector<std::string> stages = StagesIn(samples);
  chart::StackChart chart = {.title = "Seconds of a step by what they were spent on"};
  chart.in_bytes = false;
  chart.unit = " s";
  chart.columns = columns.titles;
  chart.steps = columns.steps;
  chart.bands = stages.empty() ? CoarseBands(columns) : StageBands(columns, stages);
  ColourKey key;
  for (const chart::Band& band : chart.bands) key.emplace_back(band.name, band.colour);
  std::vector<double> seconds;
  for (const StepPoint& point : record.steps.points()) seconds.push_back(point.step_seconds);
  const std::string words = absl::StrCat(
      "Rank 0; a step takes ", Seconds(Median(seconds)), " (median). ",
      stages.empty() ? "These records do not tell stages."
                     : "What its streams worked on, stacked; streams run beside each other, so the "
                       "stack may be higher than the step is long.");
  const v1::StepReport& last = record.steps.last();
  const std::string hidden =
      last.hidden_seconds() > 0
          ? absl::StrCat("<p>In the last step ", Seconds(last.hidden_seconds()),
                         " of exchanges and copies ran while the rank computed.</p>")
          : "";
  return RenderCard({"step-time", "Where a step's seconds go", words,
                     absl::StrCat(RenderFigure(
                                      [&chart](Canvas canvas) {
                                        chart.canvas = canvas;
                                        return RenderStackChart(chart);
                                      },
                                      {.width = kCardWidth, .height = 320}, key),
                                  hidden, StageTable(last))});
}

std::string CollectivesSection(const JobRecord& record) {
  const v1::StepReport& last = record.steps.last();
  if (last.comm_size() == 0) return "";
  std::vector<std::vector<std::string>> rows = {
      {"collective", "calls", "sent", "seconds", "bus bandwidth"}};
  for (const v1::CommUse& use : last.comm()) {
    rows.push_back({use.operation(), FormatCount(use.calls()), FormatBytes(use.bytes_sent()),
                    Seconds(use.seconds()),
                    use.seconds() > 0 && use.bytes_sent() > 0
                        ? absl::StrCat(FormatBytes(std::llround(
                                           static_cast<double>(use.bytes_sent()) / use.seconds())),
                                       "/s")
                        : "-"});
  }
  return RenderCard({"collectives", "Collectives of the last step",
                     "Rank 0: bytes it sent to others, and the time this took, waiting for peers "
                     "included.",
                     RenderGrid(rows, 1)});
}

std::string PositionSection(const JobRecord& record) {
  const std::vector<PositionCurve> curves = PositionCurves(record.steps.Samples());
  if (curves.empty()) return "";
  ColourKey key;
  for (const PositionCurve& curve : curves) key.emplace_back(curve.name, curve.colour);
  return RenderCard(
      {"positions", "Loss by position",
       "Mean loss in nats of the tokens in each range of positions (logarithmic axis): held-out "
       "text after the steps named, and the last tenth of training. What to look for: a model that "
       "uses its context predicts later positions better, so its line falls to the right; where "
       "the line turns flat, what lies further back no longer helps; where it rises, positions are "
       "worse off than earlier ones, as beyond the lengths a model was trained for.",
       absl::StrCat(
           RenderFigure([&curves](Canvas canvas) { return RenderPositionChart(curves, canvas); },
                        {.width = kWideWidth, .height = 300}, key),
           PositionTable(curves)),
       true});
}

}  // namespace upipe::report
