#include "tools/report/page.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/chart/charts.h"
#include "common/chart/svg.h"
#include "common/report/job_page.h"
#include "common/report/page_parts.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Band;
using chart::BarChart;
using chart::BarSeries;
using chart::Canvas;
using chart::Escape;
using chart::StackChart;

namespace {

bool IsAttention(const std::string& tag) { return absl::StartsWith(tag, "attn_"); }

// "38 % less than", or "more" when it is.
std::string BesideOther(int64_t own, int64_t other) {
  if (other == 0) return "beside";
  const double saved = 100.0 * (1.0 - static_cast<double>(own) / static_cast<double>(other));
  return absl::StrFormat("%.0f %% %s than", std::abs(saved), saved < 0 ? "more" : "less");
}

std::string StackFigure(StackChart chart) {
  ColourKey key;
  for (const Band& band : chart.bands) key.emplace_back(band.name, band.colour);
  return RenderFigure(
      [&chart](Canvas canvas) {
        chart.canvas = canvas;
        return RenderStackChart(chart);
      },
      {.width = kWideWidth, .height = 330}, key);
}

JobRecord RecordOf(const RunRecord& run, int fullest_rank) {
  JobRecord record;
  record.job = run.job;
  for (const v1::StepReport& report : run.steps) record.steps.Take(report);
  for (const v1::StepReport& report : run.ranks[fullest_rank]) record.fullest.Take(report);
  record.timeline = run.timeline;
  record.made_unix_millis = run.job.ended_unix_millis();
  return record;
}

class Page {
 public:
  explicit Page(const PageInput& input)
      : input_(input),
        record_(input.record),
        summary_(input.summary),
        plan_(input.record.job.plan()),
        method_(MethodTitle(plan_.spec().parallel().method())) {}

  std::string Render() const {
    PageExtras extras = {
        .lead = absl::StrCat("Text: ", record_.text.source, "."),
        .problems = summary_.failures,
        .tiles = Tiles(),
        .loss_levels = {{record_.text.unigram_nats,
                         absl::StrFormat("unigram %.2f", record_.text.unigram_nats), "--unigram"},
                        {record_.text.bigram_nats,
                         absl::StrFormat("bigram %.2f", record_.text.bigram_nats), "--bigram"}},
        .loss_words =
            "Nats per byte. The dashed lines are the entropies of the held-out text: the "
            "best that any model knowing only how often bytes, or pairs of bytes, occur "
            "could reach.",
        .cards = absl::StrCat(StepMemory(), Attention(), Machine())};
    return RenderJobPage(RecordOf(record_, summary_.fullest_rank), extras);
  }

 private:
  std::string Tiles() const {
    const std::string same =
        summary_.memory_as_planned
            ? "<span class=\"good\">as planned on every rank, to the byte</span>"
            : "<span class=\"bad\">not as planned</span>";
    return absl::StrCat(
        Tile("Held-out loss",
             summary_.has_held_out ? absl::StrFormat("%.3f nats", summary_.held_out_loss) : "-",
             summary_.has_held_out ? absl::StrCat(MarginText(summary_), " of the same text") : ""),
        Tile("Memory of every rank", FormatBytes(summary_.measured_peak_bytes), same),
        Tile("Attention memory", FormatBytes(summary_.attention_peak_bytes),
             absl::StrCat(BesideOther(summary_.attention_peak_bytes,
                                      summary_.ulysses_attention_planned_bytes),
                          " Ulysses for this model (",
                          FormatBytes(summary_.ulysses_attention_planned_bytes), ")")));
  }

  // Bands of one step, bottom first: what stays, then what comes and goes.
  StackChart StepStack(const std::vector<planner::TimelineMoment>& step) const {
    StackChart chart;
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      Band band = {.name = kernels::kMemoryTagNames[tag],
                   .colour = TagColour(kernels::kMemoryTagNames[tag])};
      for (const planner::TimelineMoment& moment : step)
        band.values.push_back(static_cast<double>(moment.device.bytes[tag]));
      if (std::any_of(band.values.begin(), band.values.end(),
                      [](double bytes) { return bytes > 0; })) {
        chart.bands.push_back(std::move(band));
      }
    }
    for (size_t i = 0; i < step.size(); ++i) {
      const std::string moment = engine::NameOf(step[i].at);
      chart.columns.push_back(moment);
      const std::string name = moment.substr(0, moment.find(" stage"));
      if (chart.sections.empty() || chart.sections.back().name != name)
        chart.sections.push_back({name, i, i});
      chart.sections.back().end = i + 1;
    }
    return chart;
  }

  std::string StepMemory() const {
    StackChart upipe = StepStack(input_.step);
    upipe.title = "Memory through one step, " + method_;
    upipe.planned_peak = static_cast<double>(summary_.planned_peak_bytes);
    StackChart ulysses = StepStack(input_.ulysses_step);
    ulysses.title = "Memory through one step, Ulysses";
    ulysses.planned_peak = static_cast<double>(
        PlannedMemory(record_.ulysses, FullestRank(record_.ulysses)).peak_bytes());
    const double top = 1.08 * std::max(upipe.planned_peak, ulysses.planned_peak);
    upipe.height = ulysses.height = top;
    const std::string words =
        "Bytes one rank holds, moment by moment, from a dry run of the very step that trains "
        "(kernel: " +
        Escape(plan_.attention_kernel()) + "). ";
    return absl::StrCat(
        RenderCard({"planned-step", "Through one step, planned: " + method_,
                    words + "A layer's heads take turns: its " +
                        absl::StrCat(plan_.schedule().stages_size()) +
                        " stages use the same buffers.",
                    StackFigure(std::move(upipe)), true}),
        RenderCard({"planned-ulysses", "Through one step, planned: DeepSpeed-Ulysses",
                    "The same model, ranks and context with all heads in one stage, on the same "
                    "scale.",
                    StackFigure(std::move(ulysses)), true}));
  }

  std::string Attention() const {
    BarChart chart = {
        .title = absl::StrCat("Attention memory by category, ", method_, " beside Ulysses")};
    const bool measured = summary_.ulysses_attention_measured_bytes > 0;
    BarSeries upipe = {method_ + ", measured", "--upipe", {}},
              upipe_plan = {method_ + ", planned", "--upipe-plan", {}};
    BarSeries ulysses = {"Ulysses, measured", "--ulysses", {}},
              ulysses_plan = {"Ulysses, planned", "--ulysses-plan", {}};
    const int ulysses_rank = FullestRank(record_.ulysses);
    const auto add = [&](const std::string& group, int64_t u, int64_t u_plan, int64_t d,
                         int64_t d_plan) {
      chart.groups.push_back(group);
      upipe.values.push_back(static_cast<double>(u));
      upipe_plan.values.push_back(static_cast<double>(u_plan));
      ulysses.values.push_back(static_cast<double>(d));
      ulysses_plan.values.push_back(static_cast<double>(d_plan));
    };
    for (const TagComparison& row : summary_.tags) {
      if (!IsAttention(row.tag)) continue;
      int64_t run = 0;
      if (measured) {
        const v1::TagBytes* tag = FindTag(record_.ulysses_measured.at(ulysses_rank), row.tag);
        run = tag == nullptr ? 0 : tag->peak_bytes();
      }
      add(row.tag, row.measured_bytes, row.planned_bytes, run, row.ulysses_planned_bytes);
    }
    add("together", summary_.attention_peak_bytes, summary_.attention_planned_bytes,
        summary_.ulysses_attention_measured_bytes, summary_.ulysses_attention_planned_bytes);
    chart.series = {upipe, upipe_plan};
    if (measured) chart.series.push_back(ulysses);
    chart.series.push_back(ulysses_plan);
    ColourKey key;
    for (const BarSeries& series : chart.series) key.emplace_back(series.name, series.colour);
    // Query heads at a time over all ranks, of one query chunk.
    const v1::HeadChunkSchedule& schedule = plan_.schedule();
    const double at_a_time =
        static_cast<double>(schedule.heads_per_rank() * schedule.ulysses_ranks()) /
        static_cast<double>(schedule.query_chunks());
    const double query = std::max(0.0, 1.0 - at_a_time / static_cast<double>(schedule.num_heads()));
    return RenderCard(
        {"attention", "Attention memory beside DeepSpeed-Ulysses",
         absl::StrFormat("Each category's own peak on the fullest rank; \"together\" is the "
                         "peak of their sum. Stage "
                         "buffers of query size shrink by 1 - U / (H n) = %.0f %%; outputs of all "
                         "local tokens and their "
                         "gradients stay, whatever the method.",
                         100 * query),
         absl::StrCat(RenderKey(key), RenderFigure(
                                          [&chart](Canvas canvas) {
                                            chart.width = canvas.width;
                                            return RenderBarChart(chart);
                                          },
                                          {.width = kCardWidth}, {}))});
  }

  std::string Machine() const {
    return RenderCard(
        {"machine", "Text and machine", "Coordinator, workers and trainers on one machine.",
         RenderTable({
             {"text", absl::StrCat(FormatCount(record_.text.documents), " documents, ",
                                   FormatCount(record_.text.train_tokens), " tokens to train on, ",
                                   FormatCount(record_.text.tokens), " held out")},
             {"processor", record_.machine.processor},
             {"cores", absl::StrCat(record_.machine.cores)},
             {"memory", FormatBytes(record_.machine.memory_bytes)},
             {"kernel", record_.machine.kernel},
             {"commit", record_.commit},
         })});
  }

  const PageInput& input_;
  const RunRecord& record_;
  const Summary& summary_;
  const v1::RunPlan& plan_;
  const std::string method_;
};

}  // namespace

std::string RenderPage(const PageInput& input) { return Page(input).Render(); }

}  // namespace upipe::report
