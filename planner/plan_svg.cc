#include "planner/plan_svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/chart/scale.h"
#include "common/chart/svg.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/units.h"
#include "planner/notes.h"

namespace upipe::planner {
namespace {

using chart::Bytes;
using chart::Escape;
using chart::Fill;
using chart::Number;
using chart::Range;
using chart::Rule;
using chart::Scale;
using chart::Text;
using kernels::kMemoryTagNames;
using kernels::kNumMemoryTags;
using kernels::TagBytes;

constexpr double kWidth = 1090;
constexpr double kLeft = 74;
constexpr double kRight = 790;  // of the plots; the keys are beyond
constexpr double kKeyLeft = kRight + 20;
constexpr double kKeyPeak = kWidth - 88;  // right ends of the key's numbers
constexpr double kKeyRight = kWidth - 16;
constexpr double kHeaderTop = 87;  // of the lines that tell the peaks
constexpr double kHeaderLine = 18;
constexpr double kStripHeight = 45;  // of the passes' names
constexpr double kDeviceHeight = 330;
constexpr double kHostHeight = 120;
constexpr double kHostGap = 42;
constexpr double kKeyLine = 17;
constexpr double kCharacterWidth = 6.4;  // of text, about
constexpr double kLeastColumn = 0.6;     // pixels
constexpr double kLeastHover = 3;
constexpr double kHeadroom = 34;  // above all that a panel shows

double WidthOf(const std::string& text) {
  return kCharacterWidth * static_cast<double>(text.size());
}

// What a moment, or some that are too short to tell apart, covers of the x axis.
struct Column {
  double from = 0;
  double to = 0;
  TimelineMoment moment;
};

// One of the two pools as it is drawn.
struct Panel {
  std::string name;
  PoolMoment TimelineMoment::*pool = nullptr;
  TagBytes peaks = {};  // each category's own
  double top = 0;
  double height = 0;
  std::string taken_name;  // of what is taken from the machine
  int64_t taken_bytes = 0;
  int64_t limit_bytes = 0;  // 0 = none known
  int64_t reserved_bytes = 0;
  std::string limit_words;  // after the limit's number
  double bottom() const { return top + height; }
};

// The step and, where they hold a peak, what lies before and after it.
std::vector<TimelineMoment> Drawn(const Timeline& timeline) {
  const std::vector<TimelineMoment>& all = timeline.moments;
  std::set<StepPass> peaks = {all[FullestOnDevice(all)].at.pass};
  if (const TimelineMoment& host = all[FullestOnHost(all)]; host.host.total_bytes > 0) {
    peaks.insert(host.at.pass);
  }
  std::vector<TimelineMoment> drawn;
  for (const TimelineMoment& moment : all) {
    const StepPass pass = moment.at.pass;
    const bool outside = pass == StepPass::kStarting || pass == StepPass::kEvaluate;
    if (!outside || peaks.contains(pass)) drawn.push_back(moment);
  }
  return drawn;
}

std::vector<Column> ColumnsOf(const Timeline& timeline, const std::vector<TimelineMoment>& moments,
                              double total) {
  std::vector<Column> columns;
  double done = 0;
  const auto x = [total](double at) { return kLeft + (kRight - kLeft) * at / total; };
  for (const TimelineMoment& moment : moments) {
    const double begin = done;
    done += Extent(timeline, moment);
    if (!columns.empty() && columns.back().to - columns.back().from < kLeastColumn &&
        columns.back().moment.at.pass == moment.at.pass) {
      columns.back().to = x(done);
      Absorb(columns.back().moment, moment);
    } else {
      columns.push_back({x(begin), x(done), moment});
    }
  }
  return columns;
}

std::string PassLabel(StepPass pass) {
  switch (pass) {
    case StepPass::kStarting:
      return "start";
    case StepPass::kEvaluate:
      return "evaluation";
    default:
      return NameOf(pass);
  }
}

// Columns of one pass that follow each other.
struct PassRun {
  StepPass pass = StepPass::kIdle;
  double from = 0;
  double to = 0;
  int first_layer = -1;
  int last_layer = -1;
};

std::vector<PassRun> PassRuns(const Timeline& timeline, const std::vector<TimelineMoment>& moments,
                              double total) {
  std::vector<PassRun> runs;
  double done = 0;
  for (const TimelineMoment& moment : moments) {
    if (runs.empty() || runs.back().pass != moment.at.pass) {
      runs.push_back({.pass = moment.at.pass, .from = kLeft + (kRight - kLeft) * done / total});
    }
    done += Extent(timeline, moment);
    PassRun& run = runs.back();
    run.to = kLeft + (kRight - kLeft) * done / total;
    if (moment.at.layer < 0) continue;
    if (run.first_layer < 0) run.first_layer = moment.at.layer;
    run.last_layer = moment.at.layer;
  }
  return runs;
}

// The categories that are largest at a peak: "attn_grad 20.0 GiB, residual 8.0 GiB".
std::string LargestText(const TagBytes& bytes, size_t count) {
  std::array<int, kNumMemoryTags> tags;
  std::iota(tags.begin(), tags.end(), 0);
  std::stable_sort(tags.begin(), tags.end(), [&](int a, int b) { return bytes[a] > bytes[b]; });
  std::vector<std::string> parts;
  for (const int tag : tags) {
    if (bytes[tag] == 0 || parts.size() == count) break;
    parts.push_back(absl::StrCat(kMemoryTagNames[tag], " ", FormatBytes(bytes[tag])));
  }
  return absl::StrJoin(parts, ", ");
}

std::string TimesText(double times) {
  return times < 10 ? absl::StrFormat("%.1f", times) : FormatCount(std::llround(times));
}

// A rectangle across the plot.
std::string Box(const char* look, double top, double bottom) {
  return absl::StrCat("<rect ", look, " x=\"", Number(kLeft), "\" y=\"", Number(top), "\" width=\"",
                      Number(kRight - kLeft), "\" height=\"", Number(std::max(bottom - top, 0.0)),
                      "\"/>\n");
}

// Labels that may not cover each other, of text at y, moved right until none does and then left
// until all are inside.
struct Label {
  double x = 0;  // middle
  std::string text;
};
std::string SpreadLabels(std::vector<Label> labels, double y, double tick_y) {
  constexpr double kGap = 8;
  std::vector<double> middles;
  double end = kLeft;
  for (const Label& label : labels) {
    const double half = WidthOf(label.text) / 2;
    middles.push_back(std::max(label.x, end + half));
    end = middles.back() + half + kGap;
  }
  double limit = kRight + 10;
  std::string out;
  for (size_t i = labels.size(); i-- > 0;) {
    const double half = WidthOf(labels[i].text) / 2;
    middles[i] = std::min(middles[i], limit - half);
    limit = middles[i] - half - kGap;
    absl::StrAppend(&out, Rule(middles[i], y + 3, labels[i].x, tick_y, "class=\"axis\""),
                    Text(middles[i], y, "middle", labels[i].text, "class=\"small\""));
  }
  return out;
}

class Picture {
 public:
  Picture(const Timeline& timeline, const v1::RunPlan& plan)
      : timeline_(timeline),
        plan_(plan),
        moments_(Drawn(timeline)),
        total_(std::accumulate(moments_.begin(), moments_.end(), 0.0,
                               [&](double sum, const TimelineMoment& moment) {
                                 return sum + Extent(timeline, moment);
                               })),
        columns_(ColumnsOf(timeline, moments_, total_)),
        runs_(PassRuns(timeline, moments_, total_)) {
    UPIPE_CHECK(total_ > 0) << "a step that takes no time";
    const bool host = moments_[FullestOnHost(moments_)].host.total_bytes > 0;
    panels_.push_back(DevicePanel(kHeaderTop + (host ? 2 : 1) * kHeaderLine + kStripHeight));
    if (host) panels_.push_back(HostPanel(panels_.back().bottom() + kHostGap));
  }

  std::string Render() const {
    const double bottom = panels_.back().bottom();
    std::string out = absl::StrCat(chart::OpenPicture(kWidth, bottom + 52, Title()),
                                   "<defs><pattern id=\"reserved\" width=\"6\" height=\"6\" "
                                   "patternUnits=\"userSpaceOnUse\"><path class=\"limit\" "
                                   "style=\"stroke-width:0.7\" d=\"M0 6L6 0\"/></pattern></defs>\n",
                                   Header());
    for (const Panel& panel : panels_) absl::StrAppend(&out, RenderPanel(panel));
    return absl::StrCat(out, Passes(), Layers(), Across(bottom), "</svg>\n");
  }

 private:
  Panel DevicePanel(double top) const;
  Panel HostPanel(double top) const;
  std::string Title() const;
  std::string Header() const;
  std::string RenderPanel(const Panel& panel) const;
  std::string Bands(const Panel& panel, const Scale& y) const;
  std::string Levels(const Panel& panel, const Scale& y) const;
  std::string Peak(const Panel& panel, const Scale& y, double words_y) const;
  std::string Key(const Panel& panel) const;
  std::string Hover(const Panel& panel) const;
  std::string Passes() const;
  std::string Layers() const;
  std::string Across(double bottom) const;

  double Top(const Panel& panel) const;
  bool LimitIsFar(const Panel& panel) const;
  const Column& Fullest(const Panel& panel) const;
  const TagBytes& AtPeak(const Panel& panel) const {
    return (Fullest(panel).moment.*panel.pool).bytes;
  }

  const Timeline& timeline_;
  const v1::RunPlan& plan_;
  const std::vector<TimelineMoment> moments_;
  const double total_;  // extent of all moments
  const std::vector<Column> columns_;
  const std::vector<PassRun> runs_;
  std::vector<Panel> panels_;
};

Panel Picture::DevicePanel(double top) const {
  Panel panel = {.name = "device memory",
                 .pool = &TimelineMoment::device,
                 .peaks = timeline_.device_peaks,
                 .top = top,
                 .height = kDeviceHeight,
                 .taken_name = "arena",
                 .taken_bytes = timeline_.arena_bytes};
  if (plan_.has_budget() && plan_.budget().device_bytes() > 0) {
    panel.limit_bytes = plan_.budget().device_bytes();
    panel.reserved_bytes = plan_.budget().reserved_bytes();
  } else if (plan_.spec().train().has_memory_per_rank()) {
    panel.limit_bytes = plan_.spec().train().memory_per_rank();
  }
  if (panel.reserved_bytes > 0) {
    panel.limit_words = absl::StrCat(", then ", FormatBytes(panel.reserved_bytes),
                                     " reserved for context, communicators and fragmentation");
  }
  return panel;
}

Panel Picture::HostPanel(double top) const {
  Panel panel = {.name = "host memory",
                 .pool = &TimelineMoment::host,
                 .peaks = timeline_.host_peaks,
                 .top = top,
                 .height = kHostHeight,
                 .taken_name = "pool",
                 .taken_bytes = timeline_.host_pool_bytes};
  const v1::ParallelSpec& parallel = plan_.spec().parallel();
  const int ranks = parallel.has_ranks_per_node() ? parallel.ranks_per_node() : parallel.ranks();
  if (plan_.budget().host_bytes() > 0 && ranks > 0) {
    panel.limit_bytes = plan_.budget().host_bytes() / ranks;
    panel.limit_words = absl::StrCat(": ", FormatBytes(plan_.budget().host_bytes()),
                                     " of a node for ", ranks, ranks == 1 ? " rank" : " ranks");
  }
  return panel;
}

std::string Picture::Title() const {
  return absl::StrCat(plan_.spec().name(), ": memory of rank ", timeline_.rank, " over one step");
}

std::string Picture::Header() const {
  const v1::JobSpec& spec = plan_.spec();
  const std::string model = spec.model().preset().empty()
                                ? absl::StrCat(FormatCount(plan_.num_parameters()), " parameters")
                                : spec.model().preset();
  const std::string points = absl::StrJoin(
      {model, absl::StrCat("context ", FormatTokenCount(spec.train().context())),
       absl::StrCat(spec.parallel().ranks(), spec.parallel().ranks() == 1 ? " rank" : " ranks"),
       MethodName(spec.parallel().method()), MeshText(spec.parallel()),
       absl::StrCat("U ", plan_.schedule().heads_per_rank() * plan_.schedule().ulysses_ranks(),
                    " of ", spec.model().num_heads(), " heads"),
       std::string(spec.train().dtype() == v1::DTYPE_BF16 ? "bf16" : "fp32")},
      " · ");
  std::string out = absl::StrCat(
      Text(16, 30, "start", Title(), "class=\"title\""),
      Text(16, 51, "start", points, "class=\"strong\""),
      Text(16, 69, "start", absl::StrCat("Memory policy: ", PolicyText(spec.memory()))));
  double y = kHeaderTop;
  for (const Panel& panel : panels_) {
    const Column& peak = Fullest(panel);
    absl::StrAppend(
        &out, Text(16, y, "start",
                   absl::StrCat("Peak of ", panel.name, ": ",
                                FormatBytes((peak.moment.*panel.pool).total_bytes), " at \"",
                                NameOf(peak.moment.at), "\": ", LargestText(AtPeak(panel), 4)),
                   "class=\"strong\""));
    y += kHeaderLine;
  }
  return out;
}

const Column& Picture::Fullest(const Panel& panel) const {
  return *std::max_element(columns_.begin(), columns_.end(), [&](const auto& a, const auto& b) {
    return (a.moment.*panel.pool).total_bytes < (b.moment.*panel.pool).total_bytes;
  });
}

// A limit so high that the memory below it would be flat.
bool Picture::LimitIsFar(const Panel& panel) const {
  return panel.limit_bytes + panel.reserved_bytes > 5 * panel.taken_bytes;
}

double Picture::Top(const Panel& panel) const {
  const int64_t limit = LimitIsFar(panel) ? 0 : panel.limit_bytes + panel.reserved_bytes;
  const double most = static_cast<double>(std::max({limit, panel.taken_bytes, int64_t{1}}));
  return most * panel.height / (panel.height - kHeadroom);
}

std::string Picture::RenderPanel(const Panel& panel) const {
  const Range bytes = {0, Top(panel)};
  const Scale y = {.from = bytes, .to = {panel.bottom(), panel.top}};
  std::string out;
  for (const double tick : chart::ByteTicks(bytes, panel.height > 200 ? 8 : 4)) {
    absl::StrAppend(&out, Rule(kLeft, y(tick), kRight, y(tick), "class=\"grid\""),
                    Text(kLeft - 8, y(tick) + 4, "end", Bytes(tick)));
  }
  absl::StrAppend(&out, Bands(panel, y));
  for (const PassRun& run : runs_) {
    if (run.from > kLeft) {
      absl::StrAppend(&out,
                      Rule(run.from, panel.top, run.from, panel.bottom(), "class=\"section\""));
    }
  }
  return absl::StrCat(out, Rule(kLeft, panel.bottom(), kRight, panel.bottom(), "class=\"axis\""),
                      Levels(panel, y), Key(panel), Hover(panel));
}

// Areas on each other, flat over every column.
std::string Picture::Bands(const Panel& panel, const Scale& y) const {
  std::vector<double> floor(columns_.size(), 0);
  std::string out;
  for (int tag = 0; tag < kNumMemoryTags; ++tag) {
    std::string top, bottom;
    double last_high = -1, last_low = -1;
    bool any = false;
    for (size_t i = 0; i < columns_.size(); ++i) {
      const auto bytes = static_cast<double>((columns_[i].moment.*panel.pool).bytes[tag]);
      any = any || bytes > 0;
      const double low = y(floor[i]), high = y(floor[i] + bytes);
      floor[i] += bytes;
      if (i == 0 || std::abs(high - last_high) > 0.02) {
        absl::StrAppend(&top, i == 0 ? "M" : "H", Number(columns_[i].from), i == 0 ? " " : "V",
                        Number(high));
        last_high = high;
      }
      if (i == 0 || std::abs(low - last_low) > 0.02) {
        bottom = absl::StrCat("V", Number(low), "H", Number(columns_[i].from), bottom);
        last_low = low;
      }
    }
    if (!any) continue;
    absl::StrAppend(&out, "<path ", Fill(absl::StrCat("--", kMemoryTagNames[tag])), " d=\"", top,
                    "H", Number(columns_.back().to), bottom, "Z\"><title>", kMemoryTagNames[tag],
                    "</title></path>\n");
  }
  return out;
}

// Where the words of a panel's lines and of its peak stand.
struct WordPlaces {
  double limit = 0;
  double taken = 0;
  double peak = 0;
};
// Each above what it names, or below where it would meet another.
WordPlaces PlacesOf(double limit, double reserved, double taken, double peak) {
  WordPlaces places = {.limit = reserved - 6, .taken = taken - 5, .peak = peak - 9};
  const bool near = peak - taken < 24;
  if (near) places.peak = taken - 5;
  const bool above = taken < limit;
  if (above && taken > reserved - 24) {
    places.limit = limit + 14;
  } else if (!above && taken - limit < 20) {
    places.taken = taken + 14;
    if (near) places.peak = peak + 18;
  }
  return places;
}

// What is taken from the machine, and what may be.
std::string Picture::Levels(const Panel& panel, const Scale& y) const {
  const double taken = y(static_cast<double>(panel.taken_bytes));
  const double limit = y(static_cast<double>(panel.limit_bytes));
  const double reserved = y(static_cast<double>(panel.limit_bytes + panel.reserved_bytes));
  const PoolMoment& fullest = Fullest(panel).moment.*panel.pool;
  const WordPlaces places =
      PlacesOf(limit, reserved, taken, y(static_cast<double>(fullest.total_bytes)));
  // Words stay away from the peak's.
  const bool peak_is_left = Fullest(panel).from < (kLeft + kRight) / 2;
  const double x = peak_is_left ? kRight - 6 : kLeft + 6;
  const char* anchor = peak_is_left ? "end" : "start";
  const std::string words = absl::StrCat("limit ", FormatBytes(panel.limit_bytes));
  std::string out;
  if (panel.limit_bytes > 0 && LimitIsFar(panel)) {
    const double times =
        static_cast<double>(panel.limit_bytes) / static_cast<double>(panel.taken_bytes);
    absl::StrAppend(&out, Text(x, panel.top + 12, anchor,
                               absl::StrCat("↑ ", words, ", ", TimesText(times), " times the ",
                                            panel.taken_name),
                               "class=\"bad rim\""));
  } else if (panel.limit_bytes > 0) {
    absl::StrAppend(
        &out, Box("class=\"beyond\"", panel.top, limit),
        Box("fill=\"url(#reserved)\"", reserved, limit),
        Rule(kLeft, limit, kRight, limit, "class=\"limit\""),
        Text(x, places.limit, anchor, absl::StrCat(words, panel.limit_words), "class=\"bad rim\""));
  }
  std::string taken_words = absl::StrCat(panel.taken_name, " ", FormatBytes(panel.taken_bytes));
  if (panel.limit_bytes > 0 && panel.taken_bytes > panel.limit_bytes) {
    absl::StrAppend(&taken_words, ", ", FormatBytes(panel.taken_bytes - panel.limit_bytes),
                    " too much");
  }
  return absl::StrCat(out, Rule(kLeft, taken, kRight, taken, "class=\"level\""),
                      Text(x, places.taken, anchor, taken_words, "class=\"strong rim\""),
                      Peak(panel, y, places.peak));
}

std::string Picture::Peak(const Panel& panel, const Scale& y, double words_y) const {
  const Column& peak = Fullest(panel);
  const auto bytes = (peak.moment.*panel.pool).total_bytes;
  const double x = (peak.from + peak.to) / 2;
  const std::string text = absl::StrCat("peak ", FormatBytes(bytes));
  const double half = WidthOf(text) / 2;
  const double middle = std::clamp(x, kLeft + half + 4, kRight - half - 4);
  return absl::StrCat("<circle class=\"marker\" cx=\"", Number(x), "\" cy=\"",
                      Number(y(static_cast<double>(bytes))), "\" r=\"4\" ", Fill("--ink"), "/>\n",
                      Text(middle, words_y, "middle", text, "class=\"strong rim\""));
}

// Categories from the top of the stack down, with their bytes.
std::string Picture::Key(const Panel& panel) const {
  double y = panel.top + 4;
  std::string out = absl::StrCat(Text(kKeyLeft, y, "start", panel.name, "class=\"strong\""),
                                 Text(kKeyPeak, y, "end", "own peak", "class=\"small\""),
                                 Text(kKeyRight, y, "end", "at the peak", "class=\"small\""));
  for (int tag = kNumMemoryTags - 1; tag >= 0; --tag) {
    if (panel.peaks[tag] == 0) continue;
    y += kKeyLine;
    absl::StrAppend(&out, "<rect x=\"", Number(kKeyLeft), "\" y=\"", Number(y - 9),
                    "\" width=\"10\" height=\"10\" rx=\"2\" ",
                    Fill(absl::StrCat("--", kMemoryTagNames[tag])), "/>\n",
                    Text(kKeyLeft + 16, y, "start", kMemoryTagNames[tag]),
                    Text(kKeyPeak, y, "end", FormatBytes(panel.peaks[tag])),
                    Text(kKeyRight, y, "end", FormatBytes(AtPeak(panel)[tag]), "class=\"strong\""));
  }
  return out;
}

// One invisible stretch per layer, or as many as can be told apart, that tells its fullest moment.
std::string Picture::Hover(const Panel& panel) const {
  std::vector<Column> stretches;
  for (const Column& column : columns_) {
    const engine::Moment& at = column.moment.at;
    const bool joins = !stretches.empty() && stretches.back().moment.at.pass == at.pass &&
                       (stretches.back().moment.at.layer == at.layer ||
                        stretches.back().to - stretches.back().from < kLeastHover);
    if (!joins) {
      stretches.push_back(column);
      continue;
    }
    stretches.back().to = column.to;
    Absorb(stretches.back().moment, column.moment);
  }
  std::string out;
  for (const Column& stretch : stretches) {
    const PoolMoment& pool = stretch.moment.*panel.pool;
    std::string text =
        absl::StrCat(NameOf(stretch.moment.at), "\ntotal ", FormatBytes(pool.total_bytes));
    for (int tag = kNumMemoryTags - 1; tag >= 0; --tag) {
      if (pool.bytes[tag] == 0) continue;
      absl::StrAppend(&text, "\n", kMemoryTagNames[tag], " ", FormatBytes(pool.bytes[tag]));
    }
    absl::StrAppend(&out, "<rect class=\"hover\" x=\"", Number(stretch.from), "\" y=\"",
                    Number(panel.top), "\" width=\"",
                    Number(std::max(stretch.to - stretch.from, 0.0)), "\" height=\"",
                    Number(panel.height), "\"><title>", Escape(text), "</title></rect>\n");
  }
  return out;
}

// Names of the passes above the plot: wide ones over themselves, narrow ones a line higher.
std::string Picture::Passes() const {
  const double strip = panels_[0].top - 8;
  std::vector<Label> narrow;
  std::string out;
  for (const PassRun& run : runs_) {
    const double middle = (run.from + run.to) / 2;
    std::string text = PassLabel(run.pass);
    const std::string layers =
        run.first_layer < 0
            ? text
            : absl::StrCat(text, ", layers ", run.first_layer, " to ", run.last_layer);
    if (WidthOf(layers) + 8 < run.to - run.from) text = layers;
    if (WidthOf(text) < run.to - run.from) {
      absl::StrAppend(&out, Text(middle, strip, "middle", text, "class=\"strong\""));
    } else if (run.pass != StepPass::kEmbed) {
      narrow.push_back({middle, text});
    }
  }
  return absl::StrCat(out, SpreadLabels(std::move(narrow), strip - 17, panels_[0].top));
}

// A light tick where a layer begins, as many as can be told apart.
std::string Picture::Layers() const {
  std::string out;
  double done = 0, last = -1;
  engine::Moment before;
  for (const TimelineMoment& moment : moments_) {
    const double x = kLeft + (kRight - kLeft) * done / total_;
    done += Extent(timeline_, moment);
    const bool begins = moment.at.pass != before.pass || moment.at.layer != before.layer;
    before = moment.at;
    if (!begins || moment.at.layer < 0 || x - last < kLeastHover) continue;
    last = x;
    for (const Panel& panel : panels_) {
      absl::StrAppend(&out, Rule(x, panel.bottom(), x, panel.bottom() + 4, "class=\"axis\""));
    }
  }
  return out;
}

std::string Picture::Across(double bottom) const {
  struct Unit {
    double seconds;
    const char* name;
  };
  Unit unit = {total_ / 100, "% of the step's FLOPs"};
  if (timeline_.timed) {
    unit = total_ < 1 ? Unit{1e-3, "ms"} : total_ < 600 ? Unit{1, "s"} : Unit{60, "min"};
  }
  const Range range = {0, total_ / unit.seconds};
  const Scale x = {.from = range, .to = {kLeft, kRight}};
  std::string out;
  for (const double tick : chart::RoundTicks(range, 8)) {
    absl::StrAppend(&out, Rule(x(tick), bottom + 4, x(tick), bottom + 9, "class=\"axis\""),
                    Text(x(tick), bottom + 22, "middle", chart::PlainNumber(tick)));
  }
  const std::string words = timeline_.timed
                                ? absl::StrCat("time in the step, ", unit.name, " (planned)")
                                : std::string(unit.name);
  return absl::StrCat(out, Text((kLeft + kRight) / 2, bottom + 40, "middle",
                                absl::StrCat(words, "; ticks below the plot: layers")));
}

}  // namespace

std::string PlanSvg(const Timeline& timeline, const v1::RunPlan& plan) {
  return Picture(timeline, plan).Render();
}

}  // namespace upipe::planner
