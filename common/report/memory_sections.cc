#include <algorithm>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/chart/svg.h"
#include "common/report/page_parts.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Canvas;
using chart::Escape;

namespace {

constexpr int kMostBars = 16;  // ranks
constexpr double kLimitInSight =
    1.75;  // times the peak: a limit further up would flatten the picture

// The categories in their order: the plan's, then others.
std::vector<std::string> TagsOf(const v1::MemoryUsage& planned, const v1::MemoryUsage& measured) {
  std::vector<std::string> tags;
  for (const v1::TagBytes& tag : planned.tags()) tags.push_back(tag.tag());
  for (const v1::TagBytes& tag : measured.tags()) {
    if (FindTag(planned, tag.tag()) == nullptr) tags.push_back(tag.tag());
  }
  return tags;
}

using Pool = const v1::MemoryUsage& (v1::StepReport::*)() const;

// What a pool held at its fullest moment so far, by category, after every step.
std::string PoolFigure(const StepSeries& steps, Pool pool, const v1::MemoryUsage& planned,
                       int64_t limit, const std::string& title) {
  const std::vector<v1::StepReport> samples = steps.Samples();
  const StepColumns columns = ColumnsOf(samples);
  chart::StackChart chart = {.title = title};
  chart.columns = columns.titles;
  chart.steps = columns.steps;
  for (const std::string& name : TagsOf(planned, (steps.last().*pool)())) {
    chart::Band band = {.name = name, .colour = TagColour(name), .values = {}};
    for (const auto& column : columns.columns) {
      const v1::TagBytes* tag = FindTag((column.back()->*pool)(), name);
      band.values.push_back(
          tag == nullptr ? 0 : std::max(0.0, static_cast<double>(tag->at_peak_bytes())));
    }
    if (std::any_of(band.values.begin(), band.values.end(), [](double it) { return it > 0; })) {
      chart.bands.push_back(std::move(band));
    }
  }
  if (chart.bands.empty()) return "";
  chart.planned_peak = static_cast<double>(planned.peak_bytes());
  const auto highest = static_cast<double>((steps.last().*pool)().peak_bytes());
  if (static_cast<double>(limit) < kLimitInSight * std::max(highest, chart.planned_peak)) {
    chart.limit = static_cast<double>(limit);
  }
  ColourKey key;
  for (const chart::Band& band : chart.bands) key.emplace_back(band.name, band.colour);
  return RenderFigure(
      [&chart](Canvas canvas) {
        chart.canvas = canvas;
        return RenderStackChart(chart);
      },
      {.width = kCardWidth, .height = 400}, key);
}

// One pool's categories, planned beside measured, each at its own peak.
std::string TagTable(const v1::MemoryUsage& planned, const v1::MemoryUsage& measured) {
  std::vector<std::vector<std::string>> rows = {{"peaks of", "planned", "measured"}};
  for (const std::string& name : TagsOf(planned, measured)) {
    const v1::TagBytes* plan = FindTag(planned, name);
    const v1::TagBytes* real = FindTag(measured, name);
    const int64_t plan_bytes = plan == nullptr ? 0 : plan->peak_bytes();
    const int64_t real_bytes = real == nullptr ? 0 : real->peak_bytes();
    if (plan_bytes == 0 && real_bytes == 0) continue;
    rows.push_back({name, FormatBytes(plan_bytes), FormatBytes(real_bytes)});
  }
  rows.push_back({"attention, together", FormatBytes(planned.attention_peak_bytes()),
                  FormatBytes(measured.attention_peak_bytes())});
  rows.push_back({"all, at one moment", FormatBytes(planned.peak_bytes()),
                  FormatBytes(measured.peak_bytes())});
  rows.push_back(
      {"arena", FormatBytes(planned.arena_bytes()), FormatBytes(measured.arena_bytes())});
  return RenderGrid(rows, 1);
}

bool UsesHost(const v1::Job& job) {
  for (const v1::RankPlan& rank : job.plan().ranks()) {
    if (rank.host_memory().peak_bytes() > 0) return true;
  }
  return std::any_of(job.ranks().begin(), job.ranks().end(), [](const v1::RankStatus& rank) {
    return rank.last_report().host_memory().peak_bytes() > 0;
  });
}

std::string RankBars(const v1::Job& job) {
  if (job.ranks_size() > kMostBars || job.ranks_size() != job.plan().ranks_size()) return "";
  chart::BarChart bars = {.title = "Peak memory of every rank, planned beside measured"};
  chart::BarSeries planned = {"planned", "--upipe-plan", {}},
                   measured = {"measured", "--upipe", {}};
  for (int r = 0; r < job.ranks_size(); ++r) {
    bars.groups.push_back(absl::StrCat("rank ", r));
    planned.values.push_back(static_cast<double>(job.plan().ranks(r).memory().peak_bytes()));
    measured.values.push_back(
        static_cast<double>(job.ranks(r).last_report().memory().peak_bytes()));
  }
  bars.series = {measured, planned};
  const ColourKey key = {{"measured", "--upipe"}, {"planned", "--upipe-plan"}};
  return absl::StrCat(RenderKey(key), RenderFigure(
                                          [&bars](Canvas canvas) {
                                            bars.width = canvas.width;
                                            return RenderBarChart(bars);
                                          },
                                          {.width = kWideWidth}, {}));
}

std::vector<std::string> RankRow(const v1::Job& job, const v1::RankStatus& rank, bool host) {
  const v1::StepReport& last = rank.last_report();
  const bool planned = rank.rank() < job.plan().ranks_size();
  const v1::RankPlan plan = planned ? job.plan().ranks(rank.rank()) : v1::RankPlan();
  const auto& sent = last.bytes_sent_to_peer();
  const auto peak = [&rank](const v1::MemoryUsage& usage) {
    return rank.has_last_report() ? FormatCount(usage.peak_bytes()) : "-";
  };
  std::vector<std::string> row = {absl::StrCat(rank.rank()), rank.node(),
                                  FormatCount(plan.memory().peak_bytes()), peak(last.memory())};
  if (host) {
    row.push_back(FormatCount(plan.host_memory().peak_bytes()));
    row.push_back(peak(last.host_memory()));
  }
  row.push_back(rank.has_last_report() ? absl::StrCat(last.step()) : "-");
  row.push_back(rank.has_last_report() ? Seconds(last.step_seconds() - last.comm_seconds()) : "-");
  row.push_back(last.step_seconds() > 0
                    ? absl::StrFormat("%.0f %%", 100 * last.comm_seconds() / last.step_seconds())
                    : "-");
  row.push_back(FormatBytes(std::accumulate(sent.begin(), sent.end(), int64_t{0})));
  return row;
}

}  // namespace

std::string TagColour(const std::string& tag) {
  static constexpr const char* kTags[] = {
      "weights",       "gradients", "optimizer", "residual", "attn_q", "attn_kv",  "mlp",
      "attn_exchange", "attn_out",  "attn_grad", "logits",   "comm",   "workspace"};
  for (const char* known : kTags) {
    if (tag == known) return absl::StrCat("--", tag);
  }
  return tag == "offload_host" ? "--checkpoint" : "--stage-other";
}

std::string MemorySection(const JobRecord& record) {
  const v1::RunPlan& plan = record.job.plan();
  const bool of_fullest = !record.fullest.empty();
  const StepSeries& steps = of_fullest ? record.fullest : record.steps;
  const int rank = of_fullest ? FullestRank(plan) : 0;
  const v1::RankPlan planned = rank < plan.ranks_size() ? plan.ranks(rank) : v1::RankPlan();
  const v1::MemoryUsage& last = steps.last().memory();
  const int64_t limit = plan.budget().device_bytes();
  std::string words = absl::StrCat(
      "What rank ", rank, "'s allocator held at its fullest moment so far (",
      Escape(last.peak_moment()),
      "), by category, after every step. Flat is the promise: nothing "
      "grows after step 1, and the dashed line was known before anything was allocated.");
  if (limit > 0) absl::StrAppend(&words, " A rank may take ", FormatBytes(limit), ".");
  std::string content = PoolFigure(steps, &v1::StepReport::memory, planned.memory(), limit,
                                   "Memory at the peak, by step");
  absl::StrAppend(&content, TagTable(planned.memory(), last));
  if (steps.last().host_memory().peak_bytes() > 0) {
    absl::StrAppend(&content, "<h3>Host memory</h3>",
                    PoolFigure(steps, &v1::StepReport::host_memory, planned.host_memory(), 0,
                               "Host memory at the peak, by step"),
                    TagTable(planned.host_memory(), steps.last().host_memory()));
  }
  return RenderCard({"memory", absl::StrCat("Memory of rank ", rank), words, content});
}

std::string RanksSection(const JobRecord& record) {
  const v1::Job& job = record.job;
  if (job.ranks_size() == 0) return "";
  const bool host = UsesHost(job);
  std::vector<std::vector<std::string>> rows = {{"rank", "node", "planned peak", "measured peak"}};
  if (host) rows[0].insert(rows[0].end(), {"host planned", "host measured"});
  rows[0].insert(rows[0].end(), {"step", "own time", "exchanging", "sent a step"});
  for (const v1::RankStatus& rank : job.ranks()) rows.push_back(RankRow(job, rank, host));
  return RenderCard({"ranks", "Ranks",
                     "Peak bytes of each trainer process, planned and measured, and its last step: "
                     "its own time is what it did not spend in collectives.",
                     absl::StrCat(RankBars(job), RenderGrid(rows, 2)), true});
}

}  // namespace upipe::report
