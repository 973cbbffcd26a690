#include "planner/sweep_svg.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/chart/scale.h"
#include "common/chart/svg.h"
#include "common/check.h"
#include "common/units.h"

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

constexpr double kWidth = 1000;
constexpr double kLeft = 74;
constexpr double kRight = 780;
constexpr double kKeyLeft = kRight + 22;
constexpr double kTop = 104;
constexpr double kGap = 62;
constexpr double kKeyLine = 18;
constexpr size_t kKeyCharacters = 27;
constexpr size_t kMostNumbers = 14;  // written beside a line's points
constexpr const char* kColours[] = {"--train",   "--held-out", "--rate",    "--bigram",
                                    "--unigram", "--mlp",      "--residual"};

struct Line {
  std::string label;
  std::string colour;
  std::vector<SweepPoint> points;  // ascending contexts
};

// One quantity over the context.
struct Panel {
  std::string name;
  double top = 0;
  double height = 0;
  std::function<double(const SweepPoint&)> value;
  std::function<std::string(double)> format;
  bool bytes = false;
  int64_t limit_bytes = 0;
  double bottom() const { return top + height; }
};

std::vector<Line> LinesOf(const std::vector<SweepPoint>& points) {
  std::vector<Line> lines;
  for (const SweepPoint& point : points) {
    auto line = std::find_if(lines.begin(), lines.end(),
                             [&](const Line& other) { return other.label == point.label; });
    if (line == lines.end()) {
      lines.push_back(
          {.label = point.label, .colour = kColours[lines.size() % std::size(kColours)]});
      line = std::prev(lines.end());
    }
    line->points.push_back(point);
  }
  for (Line& line : lines) {
    std::stable_sort(line.points.begin(), line.points.end(),
                     [](const auto& a, const auto& b) { return a.context < b.context; });
  }
  return lines;
}

double Octaves(int64_t context) { return std::log2(static_cast<double>(context)); }

std::string Shortened(const std::string& label) {
  return label.size() <= kKeyCharacters ? label
                                        : absl::StrCat(label.substr(0, kKeyCharacters - 1), "…");
}

class Picture {
 public:
  Picture(const std::vector<SweepPoint>& points, const SweepTexts& texts, const SweepLimits& limits)
      : points_(points), texts_(texts), lines_(LinesOf(points)) {
    Range range = {Octaves(points[0].context), Octaves(points[0].context)};
    for (const SweepPoint& point : points) {
      range.low = std::min(range.low, Octaves(point.context));
      range.high = std::max(range.high, Octaves(point.context));
    }
    const double pad = std::max(0.04 * (range.high - range.low), 0.05);
    x_ = {.from = {range.low - pad, range.high + pad}, .to = {kLeft, kRight}};
    AddPanel({.name = "device memory of the fullest rank",
              .height = 270,
              .value = [](const auto& point) { return static_cast<double>(point.device_bytes); },
              .format = Bytes,
              .bytes = true,
              .limit_bytes = limits.device_bytes});
    AddPanel({.name = "tokens per second and rank",
              .height = 150,
              .value = [](const auto& point) { return point.tokens_per_second_per_rank; },
              .format = chart::ShortNumber});
    AddPanel({.name = "host memory of the fullest node",
              .height = 110,
              .value = [](const auto& point) { return static_cast<double>(point.host_bytes); },
              .format = Bytes,
              .bytes = true,
              .limit_bytes = limits.host_bytes});
  }

  std::string Render() const {
    const double bottom = panels_.back().bottom();
    std::string out = absl::StrCat(chart::OpenPicture(kWidth, bottom + 56, texts_.title),
                                   Text(16, 30, "start", texts_.title, "class=\"title\""),
                                   Text(16, 51, "start", texts_.subtitle, "class=\"strong\""));
    for (const Panel& panel : panels_) absl::StrAppend(&out, RenderPanel(panel));
    return absl::StrCat(
        out, Text((kLeft + kRight) / 2, bottom + 42, "middle", "context, tokens of one sequence"),
        Key(), Hover(bottom), "</svg>\n");
  }

 private:
  // Only what some point has a number for; the first panel always.
  void AddPanel(Panel panel) {
    const bool any = std::any_of(points_.begin(), points_.end(),
                                 [&](const SweepPoint& point) { return panel.value(point) > 0; });
    if (!any && !panels_.empty()) return;
    panel.top = panels_.empty() ? kTop : panels_.back().bottom() + kGap;
    panels_.push_back(std::move(panel));
  }

  Scale YOf(const Panel& panel) const {
    double high = 1;
    for (const SweepPoint& point : points_) high = std::max(high, panel.value(point));
    const auto limit = static_cast<double>(panel.limit_bytes);
    if (limit < 5 * high) high = std::max(high, limit);
    return {.from = {0, 1.1 * high}, .to = {panel.bottom(), panel.top}};
  }

  std::string RenderPanel(const Panel& panel) const {
    const Scale y = YOf(panel);
    std::string out = Text(16, panel.top - 12, "start", panel.name, "class=\"strong\"");
    const int wanted = panel.height > 200 ? 8 : 4;
    for (const double tick :
         panel.bytes ? chart::ByteTicks(y.from, wanted) : chart::RoundTicks(y.from, wanted)) {
      absl::StrAppend(&out, Rule(kLeft, y(tick), kRight, y(tick), "class=\"grid\""),
                      Text(kLeft - 8, y(tick) + 4, "end", panel.format(tick)));
    }
    absl::StrAppend(&out, Contexts(panel), Limit(panel, y));
    for (const Line& line : lines_) absl::StrAppend(&out, RenderLine(line, panel, y));
    return out;
  }

  // Powers of two below the panel's axis, as many as fit.
  std::string Contexts(const Panel& panel) const {
    std::string out = Rule(kLeft, panel.bottom(), kRight, panel.bottom(), "class=\"axis\"");
    const double first = std::ceil(x_.from.low), last = std::floor(x_.from.high);
    const double stride = std::ceil((last - first + 1) / 14);
    for (double octave = first; octave <= last; octave += stride) {
      const double x = x_(octave);
      absl::StrAppend(&out, Rule(x, panel.bottom(), x, panel.bottom() + 5, "class=\"axis\""),
                      Text(x, panel.bottom() + 19, "middle",
                           FormatTokenCount(std::llround(std::exp2(octave)))));
    }
    return out;
  }

  static std::string Limit(const Panel& panel, const Scale& y) {
    if (panel.limit_bytes == 0) return "";
    const std::string words = absl::StrCat("limit ", FormatBytes(panel.limit_bytes));
    const double at = y(static_cast<double>(panel.limit_bytes));
    if (at < panel.top) {
      return Text(kLeft + 6, panel.top + 12, "start", absl::StrCat("↑ ", words),
                  "class=\"bad rim\"");
    }
    return absl::StrCat("<rect class=\"beyond\" x=\"", Number(kLeft), "\" y=\"", Number(panel.top),
                        "\" width=\"", Number(kRight - kLeft), "\" height=\"",
                        Number(at - panel.top), "\"/>\n",
                        Rule(kLeft, at, kRight, at, "class=\"limit\""),
                        Text(kLeft + 6, at - 6, "start", words, "class=\"bad rim\""));
  }

  std::string RenderLine(const Line& line, const Panel& panel, const Scale& y) const {
    std::string path, marks;
    for (const SweepPoint& point : line.points) {
      const double value = panel.value(point);
      if (value <= 0) continue;
      const std::string x = Number(x_(Octaves(point.context))), at = Number(y(value));
      absl::StrAppend(&path, path.empty() ? "M" : "L", x, " ", at);
      const std::string colour = absl::StrCat("var(", line.colour, ")");
      absl::StrAppend(&marks, "<circle cx=\"", x, "\" cy=\"", at,
                      "\" r=\"4\" style=\"stroke:", colour,
                      ";stroke-width:1.5;fill:", point.fits ? colour : "var(--card)", "\"/>\n");
      if (lines_.size() == 1 && line.points.size() <= kMostNumbers) {
        absl::StrAppend(&marks, Text(x_(Octaves(point.context)), y(value) - 9, "middle",
                                     panel.format(value), "class=\"small rim\""));
      }
    }
    if (path.empty()) return "";
    return absl::StrCat("<path class=\"line\" style=\"stroke:var(", line.colour, ")\" d=\"", path,
                        "\"/>\n", marks);
  }

  // What lines and marks mean, and how far each line fits.
  std::string Key() const {
    double y = kTop + 4;
    std::string out;
    for (const Line& line : lines_) {
      int64_t longest = 0;
      for (const SweepPoint& point : line.points) {
        if (point.fits) longest = std::max(longest, point.context);
      }
      absl::StrAppend(&out, "<rect x=\"", Number(kKeyLeft), "\" y=\"", Number(y - 9),
                      "\" width=\"10\" height=\"10\" rx=\"2\" ", Fill(line.colour), "/>\n",
                      Text(kKeyLeft + 16, y, "start", Shortened(line.label), "class=\"strong\""),
                      Text(kKeyLeft + 16, y + kKeyLine - 3, "start",
                           longest == 0 ? "fits nowhere here"
                                        : absl::StrCat("fits to ", FormatTokenCount(longest)),
                           "class=\"small\""));
      y += 2 * kKeyLine + 2;
    }
    const bool all_fit = std::all_of(points_.begin(), points_.end(),
                                     [](const SweepPoint& point) { return point.fits; });
    if (all_fit) return out;
    return absl::StrCat(out, "<circle cx=\"", Number(kKeyLeft + 5), "\" cy=\"", Number(y - 4),
                        "\" r=\"4\" style=\"stroke:var(--soft);stroke-width:1.5;fill:none\"/>\n",
                        Text(kKeyLeft + 16, y, "start", "does not fit", "class=\"small\""));
  }

  // One invisible stretch per context, which tells its numbers.
  std::string Hover(double bottom) const {
    std::vector<int64_t> contexts;
    for (const SweepPoint& point : points_) contexts.push_back(point.context);
    std::sort(contexts.begin(), contexts.end());
    contexts.erase(std::unique(contexts.begin(), contexts.end()), contexts.end());
    std::string out;
    for (size_t i = 0; i < contexts.size(); ++i) {
      const auto between = [&](size_t a, size_t b) {
        return (x_(Octaves(contexts[a])) + x_(Octaves(contexts[b]))) / 2;
      };
      const double from = i == 0 ? kLeft : between(i - 1, i);
      const double to = i + 1 == contexts.size() ? kRight : between(i, i + 1);
      absl::StrAppend(&out, "<rect class=\"hover\" x=\"", Number(from), "\" y=\"", Number(kTop),
                      "\" width=\"", Number(to - from), "\" height=\"", Number(bottom - kTop),
                      "\"><title>", Escape(Told(contexts[i])), "</title></rect>\n");
    }
    return out;
  }

  std::string Told(int64_t context) const {
    std::string text = absl::StrCat("context ", FormatTokenCount(context));
    for (const Line& line : lines_) {
      for (const SweepPoint& point : line.points) {
        if (point.context != context) continue;
        absl::StrAppend(&text, "\n", line.label, ": device ", FormatBytes(point.device_bytes));
        if (point.host_bytes > 0) {
          absl::StrAppend(&text, ", host ", FormatBytes(point.host_bytes));
        }
        if (point.tokens_per_second_per_rank > 0) {
          absl::StrAppend(
              &text, absl::StrFormat(", %.1f tokens/s per rank", point.tokens_per_second_per_rank));
        }
        if (!point.fits) absl::StrAppend(&text, ", does not fit");
      }
    }
    return text;
  }

  const std::vector<SweepPoint>& points_;
  const SweepTexts& texts_;
  const std::vector<Line> lines_;
  std::vector<Panel> panels_;
  Scale x_;  // of log2 of the context
};

}  // namespace

std::string SweepSvg(const std::vector<SweepPoint>& points, const SweepTexts& texts,
                     const SweepLimits& limits) {
  UPIPE_CHECK(!points.empty()) << "a sweep without points";
  return Picture(points, texts, limits).Render();
}

}  // namespace upipe::planner
