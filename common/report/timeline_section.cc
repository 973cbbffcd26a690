#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/chart/scale.h"
#include "common/chart/svg.h"
#include "common/metrics/names.h"
#include "common/report/page_parts.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Canvas;
using chart::Escape;
using chart::Fill;
using chart::Number;
using chart::Rule;
using chart::Text;
using Slice = v1::StepTimeline::Slice;

namespace {

constexpr size_t kColumns = 200;          // of the memory picture
constexpr size_t kMostSlicesDrawn = 400;  // of a lane; more are shared out over pixels
constexpr double kLaneHeight = 26;
// As charts have them, so that lanes and memory lie under each other.
constexpr double kLeft = 58, kRight = 112, kNarrowLeft = 52, kNarrowRight = 10;

// Of stages and tags: more are not ours.
constexpr int kMostNames = 64;

bool IsKnown(const v1::StepTimeline& timeline, const Slice& slice) {
  return slice.stage_name() >= 0 &&
         slice.stage_name() < std::min(timeline.stages_size(), kMostNames) && slice.lane() >= 0 &&
         slice.lane() < static_cast<int>(std::size(kLaneNames)) && slice.begin_nanos() >= 0 &&
         slice.end_nanos() >= slice.begin_nanos();
}

// When the last slice or change of memory was; at least 1.
int64_t EndOf(const v1::StepTimeline& timeline) {
  int64_t end = 1;
  for (const Slice& slice : timeline.slices()) end = std::max(end, slice.end_nanos());
  for (const auto& sample : timeline.memory()) end = std::max(end, sample.nanos());
  return end;
}

std::string SliceTitle(const v1::StepTimeline& timeline, const Slice& slice) {
  std::string title = absl::StrCat(timeline.stages(slice.stage_name()), ", ", slice.pass());
  if (slice.layer() >= 0) absl::StrAppend(&title, ", layer ", slice.layer());
  if (slice.stage() >= 0) absl::StrAppend(&title, ", stage ", slice.stage());
  return absl::StrCat(title, "\n",
                      Seconds(static_cast<double>(slice.end_nanos() - slice.begin_nanos()) / 1e9));
}

struct Bar {
  double left = 0;
  double right = 0;
  int stage = 0;
  std::string title;
};

// Every slice as it was.
std::vector<Bar> ExactBars(const v1::StepTimeline& timeline, const std::vector<const Slice*>& lane,
                           const chart::Scale& x) {
  std::vector<Bar> bars;
  for (const Slice* slice : lane) {
    bars.push_back({x(static_cast<double>(slice->begin_nanos())),
                    x(static_cast<double>(slice->end_nanos())), slice->stage_name(),
                    SliceTitle(timeline, *slice)});
  }
  return bars;
}

// For each pixel the stage that took most of it, where the lane was busy for at least half of it.
std::vector<Bar> PixelBars(const v1::StepTimeline& timeline, const std::vector<const Slice*>& lane,
                           const chart::Scale& x) {
  const auto pixels = static_cast<size_t>(std::max(1.0, x.to.high - x.to.low));
  const auto stages = static_cast<size_t>(std::min(timeline.stages_size(), kMostNames));
  std::vector<double> share(pixels * stages, 0);
  for (const Slice* slice : lane) {
    const double begin = x(static_cast<double>(slice->begin_nanos())) - x.to.low;
    const double end = x(static_cast<double>(slice->end_nanos())) - x.to.low;
    for (auto pixel = static_cast<size_t>(begin); pixel < pixels; ++pixel) {
      const auto left = static_cast<double>(pixel);
      if (left >= end) break;
      share[pixel * stages + static_cast<size_t>(slice->stage_name())] +=
          std::min(end, left + 1) - std::max(begin, left);
    }
  }
  std::vector<Bar> bars;
  for (size_t pixel = 0; pixel < pixels; ++pixel) {
    const auto first = share.begin() + static_cast<std::ptrdiff_t>(pixel * stages);
    const auto most = std::max_element(first, first + static_cast<std::ptrdiff_t>(stages));
    double busy = 0;
    for (auto it = first; it != first + static_cast<std::ptrdiff_t>(stages); ++it) busy += *it;
    if (busy < 0.5) continue;
    const auto stage = static_cast<int>(most - first);
    const double left = x.to.low + static_cast<double>(pixel);
    if (!bars.empty() && bars.back().stage == stage && bars.back().right == left) {
      bars.back().right = left + 1;
    } else {
      bars.push_back({left, left + 1, stage, timeline.stages(stage)});
    }
  }
  return bars;
}

std::string LanesPicture(const v1::StepTimeline& timeline,
                         const std::vector<std::vector<const Slice*>>& lanes, Canvas canvas) {
  const double left = canvas.compact ? kNarrowLeft : kLeft;
  const double right = canvas.width - (canvas.compact ? kNarrowRight : kRight);
  const int64_t end = EndOf(timeline);
  const chart::Scale x = {.from = {0, static_cast<double>(end)}, .to = {left, right}};
  std::string body;
  double top = 4;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    if (lanes[lane].empty()) continue;
    absl::StrAppend(
        &body, Text(left - 6, top + 15, "end", kLaneNames[lane], "class=\"strong\""),
        Rule(left, top + kLaneHeight - 2, right, top + kLaneHeight - 2, "class=\"grid\""));
    const bool exact = !canvas.compact && lanes[lane].size() <= kMostSlicesDrawn;
    for (const Bar& bar :
         exact ? ExactBars(timeline, lanes[lane], x) : PixelBars(timeline, lanes[lane], x)) {
      absl::StrAppend(
          &body, "<rect x=\"", Number(bar.left), "\" y=\"", Number(top), "\" width=\"",
          Number(std::max(0.25, bar.right - bar.left)), "\" height=\"20\" ",
          Fill(StageColour(timeline.stages(bar.stage))),
          exact ? absl::StrCat("><title>", Escape(bar.title), "</title></rect>\n") : "/>\n");
    }
    top += kLaneHeight;
  }
  const double seconds = static_cast<double>(end) / 1e9;
  for (const double tick : chart::RoundTicks({0, seconds}, canvas.compact ? 4 : 8)) {
    const double at = x(tick * 1e9);
    absl::StrAppend(&body, Text(at, top + 14, at > right - 20 ? "end" : "middle", Seconds(tick)));
  }
  return absl::StrCat("<svg viewBox=\"0 0 ", Number(canvas.width), " ", Number(top + 20),
                      "\" role=\"img\" aria-label=\"What ran when on each stream of the step\">\n",
                      body, "</svg>\n");
}

// The passes of the step, by what the compute lane did, as columns.
std::vector<chart::Section> PassesOf(const std::vector<const Slice*>& compute, int64_t end) {
  std::vector<chart::Section> sections;
  const auto column = [end](int64_t nanos) {
    return std::min(kColumns, static_cast<size_t>(static_cast<double>(nanos) /
                                                  static_cast<double>(end) * kColumns));
  };
  for (const Slice* slice : compute) {
    if (sections.empty() || sections.back().name != slice->pass()) {
      const size_t begin = sections.empty() ? 0 : column(slice->begin_nanos());
      if (!sections.empty()) sections.back().end = begin;
      sections.push_back({slice->pass(), begin, begin});
    }
  }
  if (sections.empty()) sections.push_back({"step", 0, 0});
  sections.back().end = kColumns;
  return sections;
}

// Bytes by category in each of kColumns stretches, at the stretch's fullest moment. Empty: none
// were told.
std::vector<std::vector<double>> BytesByColumn(const v1::StepTimeline& timeline, bool host,
                                               int64_t end) {
  const int tags = std::min(timeline.tags_size(), kMostNames);
  std::vector<double> now(static_cast<size_t>(tags), 0);
  std::vector<std::vector<double>> columns;
  const auto total = [](const std::vector<double>& bytes) {
    double sum = 0;
    for (const double it : bytes) sum += it;
    return sum;
  };
  auto sample = timeline.memory().begin();
  bool any = false;
  for (size_t i = 0; i < kColumns; ++i) {
    const double until = static_cast<double>(end) * static_cast<double>(i + 1) / kColumns;
    std::vector<double> fullest = now;
    for (; sample != timeline.memory().end(); ++sample) {
      if (i + 1 < kColumns && static_cast<double>(sample->nanos()) >= until) break;
      const bool known = sample->tag() >= 0 && sample->tag() < tags && sample->bytes() >= 0;
      if (!known || sample->host() != host) continue;
      any = true;
      now[static_cast<size_t>(sample->tag())] = static_cast<double>(sample->bytes());
      if (total(now) > total(fullest) || total(fullest) == 0) fullest = now;
    }
    columns.push_back(std::move(fullest));
  }
  if (!any) columns.clear();
  return columns;
}

std::string MemoryFigure(const v1::StepTimeline& timeline, bool host,
                         const std::vector<const Slice*>& compute, double planned_peak) {
  const int64_t end = EndOf(timeline);
  const std::vector<std::vector<double>> columns = BytesByColumn(timeline, host, end);
  if (columns.empty()) return "";
  chart::StackChart chart = {.title =
                                 host ? "Host memory through the step" : "Memory through the step"};
  chart.sections = PassesOf(compute, end);
  for (size_t i = 0; i < kColumns; ++i) {
    chart.columns.push_back(absl::StrCat(
        "at ", Seconds(static_cast<double>(end) * static_cast<double>(i) / kColumns / 1e9)));
  }
  ColourKey key;
  for (int tag = 0; tag < std::min(timeline.tags_size(), kMostNames); ++tag) {
    chart::Band band = {timeline.tags(tag), TagColour(timeline.tags(tag)), {}};
    for (const auto& column : columns) band.values.push_back(column[static_cast<size_t>(tag)]);
    if (*std::max_element(band.values.begin(), band.values.end()) <= 0) continue;
    key.emplace_back(band.name, band.colour);
    chart.bands.push_back(std::move(band));
  }
  if (chart.bands.empty()) return "";
  chart.planned_peak = planned_peak;
  return absl::StrCat(host ? "<h3>Host memory</h3>" : "<h3>Memory meanwhile</h3>",
                      RenderFigure(
                          [&chart](Canvas canvas) {
                            chart.canvas = canvas;
                            return RenderStackChart(chart);
                          },
                          {.width = kWideWidth, .height = host ? 220.0 : 300.0}, key));
}

}  // namespace

std::string TimelineSection(const JobRecord& record) {
  Card card = {
      .id = "timeline", .heading = "One step, measured", .words = "", .content = "", .wide = true};
  if (!record.timeline) {
    if (record.steps.empty()) return "";
    card.words = "No timeline of a step was recorded.";
    return RenderCard(card);
  }
  const v1::StepTimeline& timeline = *record.timeline;
  std::vector<std::vector<const Slice*>> lanes(std::size(kLaneNames));
  std::set<int> used;
  int64_t unknown = timeline.dropped_slices();
  for (const Slice& slice : timeline.slices()) {
    if (!IsKnown(timeline, slice)) {
      ++unknown;
      continue;
    }
    lanes[static_cast<size_t>(slice.lane())].push_back(&slice);
    used.insert(slice.stage_name());
  }
  ColourKey key;
  for (const int stage : used) {
    key.emplace_back(timeline.stages(stage), StageColour(timeline.stages(stage)));
  }
  card.words = absl::StrCat(
      "Step ", timeline.step(), " of rank ", timeline.rank(), ", generation ",
      timeline.generation(), ": what ran when on each of its streams. ",
      unknown > 0 ? absl::StrCat(FormatCount(unknown),
                                 " slices are left out: there was no room for "
                                 "them. ")
                  : "",
      "<code>upipe trace</code> writes the same for every rank, to be looked at closely.");
  const int rank = timeline.rank();
  const v1::RunPlan& plan = record.job.plan();
  const bool planned = rank >= 0 && rank < plan.ranks_size();
  const auto peak = [&](bool host) {
    if (!planned) return 0.0;
    const v1::RankPlan& ranks = plan.ranks(rank);
    return static_cast<double>((host ? ranks.host_memory() : ranks.memory()).peak_bytes());
  };
  card.content = absl::StrCat(
      RenderKey(key),
      RenderFigure([&](Canvas canvas) { return LanesPicture(timeline, lanes, canvas); },
                   {.width = kWideWidth}, {}),
      MemoryFigure(timeline, false, lanes[0], peak(false)),
      MemoryFigure(timeline, true, lanes[0], peak(true)));
  return RenderCard(card);
}

}  // namespace upipe::report
