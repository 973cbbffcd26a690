#include "common/report/job_page.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "common/chart/chart_style.h"
#include "common/chart/palette.h"
#include "common/chart/svg.h"
#include "common/report/page_parts.h"
#include "common/report/page_style.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Escape;

namespace {

std::string Header(const JobRecord& record, const PageExtras& extras) {
  const v1::Job& job = record.job;
  const bool bad = job.state() == v1::JOB_STATE_FAILED || job.state() == v1::JOB_STATE_CANCELLED;
  std::string out = absl::StrCat("<h1>", Escape(job.id()), " <span class=\"",
                                 bad || !extras.problems.empty() ? "bad" : "good", "\">",
                                 Escape(StateOf(job)), "</span></h1>\n");
  if (job.has_plan()) {
    const v1::RunPlan& plan = job.plan();
    absl::StrAppend(&out, "<p>", FormatCount(plan.num_parameters()), " parameters, sequences of ",
                    FormatTokenCount(plan.spec().train().context()), " tokens, ", plan.ranks_size(),
                    " ranks with ", MethodTitle(plan.spec().parallel().method()), " attention.",
                    extras.lead.empty() ? "" : " ", Escape(extras.lead), "</p>\n");
  } else if (!job.reason().empty()) {
    absl::StrAppend(&out, "<p>", Escape(job.reason()), "</p>\n");
  }
  for (const std::string& problem : extras.problems) {
    absl::StrAppend(&out, "<p class=\"bad\">", Escape(problem), "</p>\n");
  }
  if (job.state() == v1::JOB_STATE_FAILED && job.has_cause()) {
    absl::StrAppend(&out, "<p class=\"bad\">", Escape(job.cause().message()), "</p>\n");
  }
  for (const std::string& missing : record.missing) {
    absl::StrAppend(&out, "<p class=\"missing bad\">Missing on this page: ", Escape(missing),
                    "</p>\n");
  }
  if (const int64_t missing = record.steps.missing_steps(); missing > 0) {
    absl::StrAppend(&out, "<p class=\"missing bad\">Missing on this page: the records of ",
                    FormatCount(missing), missing == 1 ? " step" : " steps",
                    ", which the coordinator could not take.</p>\n");
  }
  return out;
}

// After a restart the job repeats steps that are recorded.
std::string ProgressTile(const v1::Job& job, int64_t recorded) {
  const int64_t wanted = job.spec().train().steps();
  const int64_t step = job.has_last_report() ? job.last_report().step() : recorded;
  std::string value = absl::StrCat(FormatCount(step), " of ", FormatCount(wanted));
  std::string note;
  if (job.started_unix_millis() != 0 && job.ended_unix_millis() != 0) {
    note = absl::StrCat("in ", FormatTimeSpan(absl::Milliseconds(job.ended_unix_millis() -
                                                                 job.started_unix_millis())));
  }
  const int64_t restarts = job.restarts().infrastructure() + job.restarts().application();
  if (restarts > 0) {
    absl::StrAppend(&note, note.empty() ? "" : ", ", restarts,
                    restarts == 1 ? " restart" : " restarts");
  }
  int64_t furthest = 0;
  for (const v1::AttemptSummary& attempt : job.attempts()) {
    furthest = std::max(furthest, attempt.last_step());
  }
  if (furthest > step) absl::StrAppend(&note, "; was at ", FormatCount(furthest), " before");
  return Tile("Steps", value, note);
}

std::string LossTile(const StepSeries& steps) {
  const StepPoint& last = steps.points().back();
  std::string note = "of the last step";
  for (auto point = steps.points().rbegin(); point != steps.points().rend(); ++point) {
    if (!point->held_out) continue;
    note = absl::StrFormat("held out %.4f after step %d", *point->held_out, point->step);
    break;
  }
  return Tile("Loss",
              std::isfinite(last.loss) ? absl::StrFormat("%.4f nats", last.loss) : "no number",
              note);
}

std::string SpeedTile(const JobRecord& record) {
  std::vector<double> rates, seconds, shares;
  for (const StepPoint& point : record.steps.points()) {
    rates.push_back(point.tokens_per_second);
    seconds.push_back(point.step_seconds);
    shares.push_back(point.comm_seconds / point.step_seconds);
  }
  std::string note =
      absl::StrCat(Seconds(Median(seconds)), " a step, ",
                   absl::StrFormat("%.0f %%", 100 * Median(shares)), " of it in collectives");
  if (const double mfu = CausalMfu(record.job.plan(), Median(seconds)); mfu > 0) {
    absl::StrAppendFormat(&note, ", MFU %.1f %%", 100 * mfu);
  }
  const double rate = Median(rates);
  return Tile(
      "Throughput, median",
      absl::StrCat(std::isfinite(rate) ? FormatCount(std::llround(rate)) : "-", " tokens/s"), note);
}

std::string MemoryTile(const v1::Job& job) {
  int64_t measured = 0, planned = 0, host = 0;
  for (const v1::RankStatus& rank : job.ranks()) {
    measured = std::max(measured, rank.last_report().memory().peak_bytes());
    host = std::max(host, rank.last_report().host_memory().peak_bytes());
  }
  for (const v1::RankPlan& rank : job.plan().ranks()) {
    planned = std::max(planned, rank.memory().peak_bytes());
  }
  std::string note = measured == planned && measured > 0
                         ? "<span class=\"good\">as planned, to the byte</span>"
                         : absl::StrCat("planned ", FormatBytes(planned));
  if (host > 0) absl::StrAppend(&note, "; and ", FormatBytes(host), " of host memory");
  return Tile("Peak memory of a rank", measured > 0 ? FormatBytes(measured) : "-", note);
}

std::string Tiles(const JobRecord& record, const PageExtras& extras) {
  const v1::Job& job = record.job;
  const bool stepped = !record.steps.empty();
  return absl::StrCat("<div class=\"tiles\">\n",
                      ProgressTile(job, stepped ? record.steps.points().back().step : 0),
                      stepped ? LossTile(record.steps) + SpeedTile(record) : "",
                      job.has_plan() ? MemoryTile(job) : "", extras.tiles, "</div>\n");
}

// Links to the sections that `body` holds, by their ids and headings.
std::string Contents(const std::string& body) {
  std::string out = "<nav>";
  const std::string open = "<section id=\"";
  for (size_t at = body.find(open); at != std::string::npos; at = body.find(open, at + 1)) {
    const size_t id = at + open.size();
    const size_t heading = body.find("<h2>", at) + 4;
    absl::StrAppend(&out, "<a href=\"#", body.substr(id, body.find('"', id) - id), "\">",
                    body.substr(heading, body.find("</h2>", heading) - heading), "</a>\n");
  }
  return absl::StrCat(out, "</nav>\n");
}

std::string Sections(const JobRecord& record, const PageExtras& extras) {
  std::string out;
  if (record.steps.empty()) {
    out = RenderCard({"steps", "Steps",
                      record.job.has_plan() ? "No step of this job was recorded."
                                            : "This job was not planned, and has no steps.",
                      "", true});
  } else {
    out = absl::StrCat(LossSection(record, extras.loss_levels, extras.loss_words),
                       ThroughputSection(record), MfuSection(record), GradientSection(record),
                       StepTimeSection(record), MemorySection(record), CollectivesSection(record),
                       PositionSection(record), TimelineSection(record));
  }
  return absl::StrCat(out, extras.cards, RanksSection(record), CourseSection(record),
                      CheckpointSection(record), ConfigurationSection(record));
}

}  // namespace

std::string RenderJobPage(const JobRecord& record, const PageExtras& extras) {
  const std::string sections = Sections(record, extras);
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>UPipe: ",
      Escape(record.job.id()), "</title>\n<style>", chart::kPalette, chart::kChartStyle, kPageStyle,
      "</style></head>\n<body><main>\n", Header(record, extras), Contents(sections),
      Tiles(record, extras), "<div class=\"grid\">\n", sections, "</div>\n<footer>",
      record.made_unix_millis == 0
          ? ""
          : absl::StrCat("As of ", UtcTime(record.made_unix_millis), " UTC."),
      "</footer>\n</main></body></html>\n");
}

}  // namespace upipe::report
