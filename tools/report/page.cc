#include "tools/report/page.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "common/chart/palette.h"
#include "common/chart/svg.h"
#include "common/spec/job_spec.h"
#include "common/units.h"
#include "tools/report/charts.h"
#include "tools/report/page_style.h"
#include "tools/report/position_chart.h"

namespace upipe::report {

using chart::Escape;
using chart::ShortNumber;

namespace {

constexpr size_t kMostStepColumns = 360;

bool IsAttention(const std::string& tag) { return absl::StartsWith(tag, "attn_"); }

std::string Colour(const std::string& tag) { return absl::StrCat("--", tag); }

std::string Tile(const std::string& name, const std::string& value, const std::string& note) {
  return absl::StrCat("<div class=\"tile\"><div class=\"name\">", Escape(name),
                      "</div><div class=\"value\">", Escape(value), "</div><div class=\"note\">",
                      note, "</div></div>\n");
}

std::string Card(const std::string& heading, const std::string& words, const std::string& content,
                 const char* more = "") {
  return absl::StrCat("<section class=\"card ", more, "\"><h2>", Escape(heading), "</h2><p>", words,
                      "</p>\n", content, "</section>\n");
}

std::string Key(const std::vector<std::pair<std::string, std::string>>& names_and_colours) {
  std::string out = "<div class=\"key\">";
  for (const auto& [name, colour] : names_and_colours) {
    absl::StrAppend(&out, "<span><i style=\"background:var(", colour, ")\"></i>", Escape(name),
                    "</span>");
  }
  return absl::StrCat(out, "</div>\n");
}

// "38 % less than", or "more" when it is.
std::string BesideOther(int64_t own, int64_t other) {
  if (other == 0) return "beside";
  const double saved = 100.0 * (1.0 - static_cast<double>(own) / static_cast<double>(other));
  return absl::StrFormat("%.0f %% %s than", std::abs(saved), saved < 0 ? "more" : "less");
}

class Page {
 public:
  explicit Page(const PageInput& input)
      : input_(input),
        record_(input.record),
        summary_(input.summary),
        plan_(input.record.job.plan()),
        spec_(plan_.spec()),
        method_(MethodTitle(spec_.parallel().method())) {}

  std::string Render() const {
    return absl::StrCat(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>UPipe: ",
        Escape(record_.job.id()), "</title>\n<style>", chart::kPalette, kPageStyle,
        "</style></head>\n<body><main>\n", Header(), Tiles(), "<div class=\"grid\">\n", Loss(),
        Speed(), LossByPosition(), StepMemory(), MemoryOverTime(), Attention(), Ranks(), Tables(),
        "</div>\n</main></body></html>\n");
  }

 private:
  std::string Header() const {
    const auto& parallel = spec_.parallel();
    const bool upipe = parallel.method() == v1::METHOD_UPIPE;
    std::string out = absl::StrCat(
        "<h1>", Escape(record_.job.id()), " <span class=\"",
        summary_.failures.empty() ? "good" : "bad", "\">", Escape(summary_.state),
        "</span></h1>\n<p>", FormatCount(plan_.num_parameters()), " parameters trained on ",
        FormatCount(summary_.steps), " sequences of ", FormatTokenCount(spec_.train().context()),
        " tokens by ", parallel.ranks(), " ranks with ", method_, " attention",
        upipe ? absl::StrCat(", ", parallel.heads_per_stage(), " of ", spec_.model().num_heads(),
                             " heads at a time")
              : "",
        ". Text: ", Escape(record_.text.source), ".</p>\n");
    for (const std::string& failure : summary_.failures) {
      absl::StrAppend(&out, "<p class=\"bad\">", Escape(failure), "</p>\n");
    }
    return out;
  }

  std::string Tiles() const {
    const std::string held_out =
        summary_.has_held_out ? absl::StrFormat("%.3f nats", summary_.held_out_loss) : "-";
    const std::string margin = absl::StrCat(MarginText(summary_), " of the same text");
    const std::string same =
        summary_.memory_as_planned
            ? "<span class=\"good\">as planned on every rank, to the byte</span>"
            : "<span class=\"bad\">not as planned</span>";
    return absl::StrCat(
        "<div class=\"tiles\">\n",
        Tile("Held-out loss", held_out, summary_.has_held_out ? margin : ""),
        Tile("Throughput, median",
             absl::StrCat(FormatCount(static_cast<int64_t>(summary_.tokens_per_second)),
                          " tokens/s"),
             absl::StrFormat("%.2f s a step, %.0f %% of it in communication", summary_.step_seconds,
                             100 * summary_.comm_share)),
        Tile("Peak memory of a rank", FormatBytes(summary_.measured_peak_bytes),
             absl::StrCat(UsesHost()
                              ? absl::StrCat("and ", FormatBytes(summary_.host_measured_peak_bytes),
                                             " of host memory; ")
                              : "",
                          same)),
        Tile("Attention memory", FormatBytes(summary_.attention_peak_bytes),
             absl::StrCat(BesideOther(summary_.attention_peak_bytes,
                                      summary_.ulysses_attention_planned_bytes),
                          " Ulysses for this model (",
                          FormatBytes(summary_.ulysses_attention_planned_bytes), ")")),
        "</div>\n");
  }

  std::string Loss() const {
    LineChart chart = {.title = "Training and held-out loss by step", .unit = "nats"};
    LineSeries train = {.name = "training", .colour = "--train"};
    LineSeries held_out = {.name = "held out", .colour = "--held-out", .markers = true};
    for (const v1::StepReport& report : record_.steps) {
      const auto step = static_cast<double>(report.step());
      train.points.push_back({step, report.loss()});
      if (report.has_held_out_loss()) held_out.points.push_back({step, report.held_out_loss()});
    }
    chart.series = {std::move(train), std::move(held_out)};
    chart.levels = {{record_.text.unigram_nats,
                     absl::StrFormat("unigram %.2f", record_.text.unigram_nats), "--unigram"},
                    {record_.text.bigram_nats,
                     absl::StrFormat("bigram %.2f", record_.text.bigram_nats), "--bigram"}};
    return Card("Loss",
                "Nats per byte. The dashed lines are the entropies of the held-out text: the best "
                "that any model knowing "
                "only how often bytes, or pairs of bytes, occur could reach.",
                RenderLineChart(chart));
  }

  std::string Speed() const {
    LineChart chart = {.title = "Tokens per second by step",
                       .from_zero = true,
                       .unit = "tokens/s",
                       .format = ShortNumber};
    LineSeries rate = {.name = "all ranks", .colour = "--rate"};
    for (const v1::StepReport& report : record_.steps) {
      rate.points.push_back({static_cast<double>(report.step()), report.tokens_per_second()});
    }
    chart.series = {std::move(rate)};
    chart.levels = {{summary_.tokens_per_second,
                     absl::StrCat("median ", ShortNumber(summary_.tokens_per_second)),
                     "--unigram"}};
    return Card("Throughput",
                "Tokens per second of all ranks together, one point per optimizer step, exchanges "
                "included.",
                RenderLineChart(chart));
  }

  std::string LossByPosition() const {
    const std::vector<PositionCurve> curves = PositionCurves(record_.steps);
    if (curves.empty()) return "";
    return Card("Loss by position",
                "Mean loss in nats of the tokens in each range of positions (logarithmic axis): "
                "held-out text at several steps, and the last tenth of training. What to look for: "
                "a model that uses its context predicts later positions better, so its line falls "
                "to the right; where the line turns flat, what lies further back no longer helps; "
                "where it rises, positions are worse off than earlier ones, as beyond the lengths "
                "a model was trained for.",
                absl::StrCat(Key({{"held out, after the step named", "--held-out"},
                                  {"training, last tenth of the steps", "--train"}}),
                             RenderPositionChart(curves, {.width = 1106, .height = 300}),
                             PositionTable(curves)),
                "wide");
  }

  // What the picture shows, in digits: a fall of a hundredth is no visible one.
  static std::string PositionTable(const std::vector<PositionCurve>& curves) {
    const auto most = std::max_element(
        curves.begin(), curves.end(),
        [](const auto& a, const auto& b) { return a.ranges.size() < b.ranges.size(); });
    std::string out = "<table><thead><tr><th></th>";
    for (const v1::PositionLoss& range : most->ranges) {
      absl::StrAppend(&out, "<th class=\"n\">", FormatTokenCount(range.begin()), " to ",
                      FormatTokenCount(range.end()), "</th>");
    }
    absl::StrAppend(&out, "<th class=\"n\">last less first</th></tr></thead>\n");
    for (const PositionCurve& curve : curves) {
      absl::StrAppend(&out, "<tr><td class=\"name\">", Escape(curve.name), "</td>");
      for (const v1::PositionLoss& column : most->ranges) {
        const auto range = std::find_if(
            curve.ranges.begin(), curve.ranges.end(),
            [&column](const v1::PositionLoss& it) { return it.begin() == column.begin(); });
        absl::StrAppend(&out, "<td class=\"n\">",
                        range == curve.ranges.end() ? "-" : absl::StrFormat("%.4f", range->loss()),
                        "</td>");
      }
      absl::StrAppendFormat(&out, "<td class=\"n\">%+.4f</td></tr>\n",
                            curve.ranges.back().loss() - curve.ranges.front().loss());
    }
    return absl::StrCat(out, "</table>");
  }

  // Bands of one step, bottom first: what stays, then what comes and goes.
  StackChart StepStack(const std::vector<planner::TimelineMoment>& step) const {
    StackChart chart = {.canvas = {.width = 1106, .height = 330}};
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      Band band = {.name = kernels::kMemoryTagNames[tag],
                   .colour = Colour(kernels::kMemoryTagNames[tag])};
      for (const planner::TimelineMoment& moment : step)
        band.bytes.push_back(static_cast<double>(moment.device.bytes[tag]));
      if (std::any_of(band.bytes.begin(), band.bytes.end(),
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
    upipe.height_bytes = ulysses.height_bytes = top;
    const std::string words =
        "Bytes one rank holds, moment by moment, from a dry run of the very step that trains "
        "(kernel: " +
        Escape(plan_.attention_kernel()) + "). ";
    return absl::StrCat(
        Card("Through one step: " + method_,
             words + "A layer's heads take turns: its " +
                 absl::StrCat(plan_.schedule().stages_size()) + " stages use the same buffers.",
             RenderStackChart(upipe), "wide"),
        Card("Through one step: DeepSpeed-Ulysses",
             "The same model, ranks and context with all heads in one stage, on the same scale.",
             RenderStackChart(ulysses), "wide"));
  }

  std::string MemoryOverTime() const {
    const StepReports& reports = record_.ranks[summary_.fullest_rank];
    const size_t stride = (reports.size() + kMostStepColumns - 1) / kMostStepColumns;
    StackChart chart = {.title = "Memory at the peak, by step",
                        .canvas = {.width = 540, .height = 470}};
    chart.planned_peak = static_cast<double>(summary_.planned_peak_bytes);
    for (const v1::TagBytes& planned : PlannedMemory(plan_, summary_.fullest_rank).tags()) {
      Band band = {.name = planned.tag(), .colour = Colour(planned.tag())};
      for (size_t i = 0; i < reports.size(); i += stride) {
        const v1::TagBytes* tag = FindTag(reports[i].memory(), planned.tag());
        band.bytes.push_back(tag == nullptr ? 0 : static_cast<double>(tag->at_peak_bytes()));
      }
      if (std::any_of(band.bytes.begin(), band.bytes.end(),
                      [](double bytes) { return bytes > 0; })) {
        chart.bands.push_back(std::move(band));
      }
    }
    for (size_t i = 0; i < reports.size(); i += stride)
      chart.columns.push_back(absl::StrCat("step ", reports[i].step()));
    return Card("Over the whole run, measured",
                absl::StrCat("What rank ", summary_.fullest_rank,
                             "'s allocator held at its fullest moment so far (",
                             Escape(reports.back().memory().peak_moment()),
                             "), by category, after every step. Flat is the promise: nothing grows "
                             "after step 1, and the "
                             "dashed line was known before anything was allocated."),
                RenderStackChart(chart));
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
      upipe.bytes.push_back(static_cast<double>(u));
      upipe_plan.bytes.push_back(static_cast<double>(u_plan));
      ulysses.bytes.push_back(static_cast<double>(d));
      ulysses_plan.bytes.push_back(static_cast<double>(d_plan));
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
    std::vector<std::pair<std::string, std::string>> key;
    for (const BarSeries& series : chart.series) key.emplace_back(series.name, series.colour);
    // Query heads at a time over all ranks, of one query chunk.
    const v1::HeadChunkSchedule& schedule = plan_.schedule();
    const double at_a_time =
        static_cast<double>(schedule.heads_per_rank() * schedule.ulysses_ranks()) /
        static_cast<double>(schedule.query_chunks());
    const double query = std::max(0.0, 1.0 - at_a_time / static_cast<double>(schedule.num_heads()));
    return Card(
        "Attention memory beside DeepSpeed-Ulysses",
        absl::StrFormat("Each category's own peak on the fullest rank; \"together\" is the "
                        "peak of their sum. Stage "
                        "buffers of query size shrink by 1 - U / (H n) = %.0f %%; outputs of all "
                        "local tokens and their "
                        "gradients stay, whatever the method.",
                        100 * query),
        absl::StrCat(Key(key), RenderBarChart(chart)));
  }

  bool UsesHost() const {
    return summary_.host_planned_peak_bytes > 0 || summary_.host_measured_peak_bytes > 0;
  }

  // "peak, planned, arena" of one pool, or their headings.
  static std::string PoolCells(const v1::MemoryUsage& measured, const v1::MemoryUsage& planned) {
    return absl::StrCat("<td class=\"n\">", FormatCount(measured.peak_bytes()),
                        "</td><td class=\"n\">", FormatCount(planned.peak_bytes()),
                        "</td><td class=\"n\">", FormatBytes(measured.arena_bytes()), "</td>");
  }
  static std::string PoolHeadings(const std::string& pool) {
    std::string cells;
    for (const char* name : {"peak", "planned", "arena"})
      absl::StrAppend(&cells, "<th class=\"n\">", pool, name, "</th>");
    return cells;
  }

  std::string Ranks() const {
    std::string rows = absl::StrCat(
        "<table><thead><tr><th>rank</th><th>node</th>", PoolHeadings(""),
        UsesHost() ? PoolHeadings("host ") : "",
        "<th class=\"n\">sent a step</th><th class=\"n\">communication</th></tr></thead>\n");
    for (size_t rank = 0; rank < record_.ranks.size(); ++rank) {
      const v1::StepReport& last = record_.ranks[rank].back();
      const auto& sent = last.bytes_sent_to_peer();
      const std::string node = static_cast<int>(rank) < record_.job.ranks_size()
                                   ? record_.job.ranks(static_cast<int>(rank)).node()
                                   : "";
      const v1::RankPlan& plan = plan_.ranks(static_cast<int>(rank));
      absl::StrAppendFormat(
          &rows,
          "<tr><td>%d</td><td>%s</td>%s%s<td class=\"n\">%s</td><td class=\"n\">%.0f "
          "%%</td></tr>\n",
          rank, Escape(node), PoolCells(last.memory(), plan.memory()),
          UsesHost() ? PoolCells(last.host_memory(), plan.host_memory()) : "",
          FormatBytes(std::accumulate(sent.begin(), sent.end(), int64_t{0})),
          100 * last.comm_seconds() / last.step_seconds());
    }
    return Card("Ranks", "Bytes measured and planned, of each trainer process, and its last step.",
                absl::StrCat(rows, "</table>"), "wide");
  }

  static std::string Table(const std::vector<std::pair<std::string, std::string>>& rows) {
    std::string out = "<table>";
    for (const auto& [name, value] : rows) {
      if (value.empty()) continue;
      absl::StrAppend(&out, "<tr><td class=\"name\">", Escape(name), "</td><td>", Escape(value),
                      "</td></tr>\n");
    }
    return absl::StrCat(out, "</table>");
  }

  std::string Tables() const {
    const auto& model = spec_.model();
    const auto& optimizer = spec_.optimizer();
    const std::string when =
        absl::FormatTime("%Y-%m-%d %H:%M", absl::FromUnixMillis(record_.job.started_unix_millis()),
                         absl::UTCTimeZone());
    const std::string job = Table({
        {"model", absl::StrCat(model.num_layers(), " layers, d = ", model.hidden_size(), ", ",
                               model.num_heads(), " heads, ", model.num_kv_heads(),
                               " K/V heads, D = ", model.head_dim(), ", F = ",
                               model.intermediate_size(), ", vocabulary ", model.vocab_size())},
        {"optimizer", absl::StrCat("AdamW, peak learning rate ", optimizer.learning_rate(), ", ",
                                   optimizer.warmup_steps(), " steps of warm-up, cosine, clip ",
                                   optimizer.clip_norm())},
        {"text", absl::StrCat(FormatCount(record_.text.documents), " documents, ",
                              FormatCount(record_.text.train_tokens), " tokens to train on, ",
                              FormatCount(record_.text.tokens), " held out")},
        {"schedule",
         absl::StrCat(plan_.schedule().stages_size(), " stages, ",
                      plan_.schedule().heads_per_rank(), " query heads per rank and stage, hash ",
                      absl::Hex(plan_.schedule_hash()))},
        {"step", absl::StrFormat("%.3g TFLOP of model (causal), without recomputation",
                                 plan_.model_flops() / 1e12)},
        {"notes", absl::StrJoin(plan_.notes(), "; ")},
    });
    const std::string machine = Table({
        {"started", record_.job.started_unix_millis() == 0 ? "" : when + " UTC"},
        {"ran",
         summary_.run_seconds > 0 ? FormatTimeSpan(absl::Seconds(summary_.run_seconds)) : ""},
        {"processor", record_.machine.processor},
        {"cores", absl::StrCat(record_.machine.cores)},
        {"memory", FormatBytes(record_.machine.memory_bytes)},
        {"kernel", record_.machine.kernel},
        {"commit", record_.commit},
    });
    return absl::StrCat(
        Card("Job and plan", "What was asked for, and what the planner made of it.", job),
        Card("Machine", "Coordinator, workers and trainers on one machine.", machine));
  }

  const PageInput& input_;
  const RunRecord& record_;
  const Summary& summary_;
  const v1::RunPlan& plan_;
  const v1::JobSpec& spec_;
  const std::string method_;
};

}  // namespace

std::string RenderPage(const PageInput& input) { return Page(input).Render(); }

}  // namespace upipe::report
