#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "common/chart/scale.h"
#include "common/chart/svg.h"
#include "common/report/page_parts.h"
#include "common/report/sections.h"
#include "common/units.h"

namespace upipe::report {

using chart::Canvas;
using chart::Escape;
using chart::Number;
using chart::Rule;
using chart::Text;

namespace {

constexpr int kMostEvents = 60;
constexpr double kLeft = 58, kRight = 20, kNarrowLeft = 12, kNarrowRight = 10;

// One attempt on the clock; `what` is read on hover.
struct Stretch {
  double from = 0;  // unix milliseconds
  double to = 0;
  int64_t generation = 0;
  bool well = false;
  std::string what;
};

std::string CauseName(const v1::Cause& cause) {
  return std::string(absl::StripPrefix(v1::CauseKind_Name(cause.kind()), "CAUSE_KIND_"));
}

std::string IntentName(v1::StopIntent intent) {
  return std::string(absl::StripPrefix(v1::StopIntent_Name(intent), "STOP_INTENT_"));
}

// "SIGNAL, rank 2 on w1: ended by SIGKILL".
std::string Why(const v1::Cause& cause) {
  std::string text;
  if (cause.kind() != v1::CAUSE_KIND_UNSPECIFIED) text = CauseName(cause);
  if (cause.has_rank()) absl::StrAppend(&text, ", rank ", cause.rank());
  if (!cause.node().empty()) absl::StrAppend(&text, " on ", cause.node());
  if (!cause.message().empty()) absl::StrAppend(&text, text.empty() ? "" : ": ", cause.message());
  return text;
}

int64_t EndOf(const JobRecord& record) {
  return record.job.ended_unix_millis() != 0 ? record.job.ended_unix_millis()
                                             : record.made_unix_millis;
}

// Ended attempts, then the one that is not in the summaries, from its STARTING event on.
std::vector<Stretch> Stretches(const JobRecord& record) {
  const v1::Job& job = record.job;
  std::vector<Stretch> stretches;
  for (const v1::AttemptSummary& attempt : job.attempts()) {
    stretches.push_back({static_cast<double>(attempt.placed_unix_millis()),
                         static_cast<double>(attempt.ended_unix_millis()), attempt.generation(),
                         attempt.intent() == v1::STOP_INTENT_SUCCEED,
                         absl::StrCat("generation ", attempt.generation(), ", ",
                                      IntentName(attempt.intent()), "\n", Why(attempt.cause()))});
  }
  const bool told = !stretches.empty() && stretches.back().generation == job.generation();
  if (job.generation() == 0 || told) return stretches;
  for (auto event = job.events().rbegin(); event != job.events().rend(); ++event) {
    if (event->kind() != "STARTING" || event->generation() != job.generation()) continue;
    stretches.push_back({static_cast<double>(event->unix_millis()),
                         static_cast<double>(EndOf(record)), job.generation(),
                         !job.has_cause() || job.state() == v1::JOB_STATE_RUNNING,
                         absl::StrCat("generation ", job.generation(), ", ", StateOf(job))});
    break;
  }
  return stretches;
}

std::string CoursePicture(const JobRecord& record, const std::vector<Stretch>& stretches,
                          Canvas canvas) {
  const v1::Job& job = record.job;
  const double left = canvas.compact ? kNarrowLeft : kLeft;
  const double right = canvas.width - (canvas.compact ? kNarrowRight : kRight);
  const auto begin = static_cast<double>(job.submitted_unix_millis());
  const double end = std::max(begin + 1000, static_cast<double>(EndOf(record)));
  const chart::Scale x = {.from = {begin, end}, .to = {left, right}};
  std::string out = absl::StrCat("<svg viewBox=\"0 0 ", Number(canvas.width),
                                 " 84\" role=\"img\" aria-label=\"Attempts and events by time\">\n",
                                 Rule(left, 58, right, 58, "class=\"axis\""));
  for (const Stretch& stretch : stretches) {
    const double from = x(std::clamp(stretch.from, begin, end));
    const double width = std::max(2.0, x(std::clamp(stretch.to, begin, end)) - from);
    absl::StrAppend(&out, "<rect x=\"", Number(from), "\" y=\"8\" width=\"", Number(width),
                    "\" height=\"26\" rx=\"3\" style=\"fill:var(",
                    stretch.well ? "--good" : "--bad", ")\" fill-opacity=\"0.75\"><title>",
                    Escape(stretch.what), "</title></rect>\n");
    if (width > 24) {
      absl::StrAppend(&out, Text(from + width / 2, 25, "middle", absl::StrCat(stretch.generation),
                                 "class=\"strong\""));
    }
  }
  for (const v1::JobEvent& event : job.events()) {
    const double at = x(std::clamp(static_cast<double>(event.unix_millis()), begin, end));
    absl::StrAppend(&out, "<g><title>", Escape(absl::StrCat(event.kind(), ": ", event.message())),
                    "</title>", Rule(at, 42, at, 58, "class=\"axis\" style=\"stroke:var(--ink)\""),
                    "</g>\n");
  }
  const double seconds = (end - begin) / 1e3;
  double free_from = 0;
  for (const double tick : chart::RoundTicks({0, seconds}, canvas.compact ? 3 : 8)) {
    const double at = x(begin + tick * 1e3);
    const std::string label = tick == 0 ? "submitted" : FormatTimeSpan(absl::Seconds(tick));
    const double half = 3.1 * static_cast<double>(label.size());
    const char* anchor = tick == 0 ? "start" : at + half > canvas.width ? "end" : "middle";
    if (at - half < free_from) continue;
    free_from = at + half + 10 + (tick == 0 ? half : 0);
    absl::StrAppend(&out, Text(at, 76, anchor, label));
  }
  return absl::StrCat(out, "</svg>\n");
}

std::string AttemptTable(const v1::Job& job) {
  if (job.attempts_size() == 0) return "";
  std::vector<std::vector<std::string>> rows = {
      {"generation", "placed", "lasted", "ended by", "last step", "why"}};
  for (const v1::AttemptSummary& attempt : job.attempts()) {
    rows.push_back(
        {absl::StrCat(attempt.generation()), UtcTime(attempt.placed_unix_millis()),
         FormatTimeSpan(
             absl::Milliseconds(attempt.ended_unix_millis() - attempt.placed_unix_millis())),
         IntentName(attempt.intent()), absl::StrCat(attempt.last_step()), Why(attempt.cause())});
  }
  return absl::StrCat("<h3>Attempts that ended</h3>", RenderGrid(rows, 6));
}

std::string EventTable(const v1::Job& job) {
  if (job.events_size() == 0) return "";
  std::vector<std::vector<std::string>> rows = {{"time (UTC)", "generation", "event", ""}};
  const int first = std::max(0, job.events_size() - kMostEvents);
  for (int i = first; i < job.events_size(); ++i) {
    const v1::JobEvent& event = job.events(i);
    rows.push_back({UtcTime(event.unix_millis()), absl::StrCat(event.generation()), event.kind(),
                    event.message()});
  }
  return absl::StrCat(
      "<h3>Events",
      first > 0 ? absl::StrCat(", the last ", kMostEvents, " of ", job.events_size()) : "", "</h3>",
      RenderGrid(rows, 4));
}

std::string CauseText(const v1::Job& job) {
  if (!job.has_cause()) return "";
  std::string out = absl::StrCat("<p class=\"bad\">", Escape(Why(job.cause())), "</p>\n");
  if (!job.cause().evidence().empty()) {
    absl::StrAppend(&out, "<p>Evidence: ", Escape(job.cause().evidence()), "</p>\n");
  }
  if (job.cause().log_tail_size() == 0) return out;
  absl::StrAppend(&out, "<pre>");
  for (const std::string& line : job.cause().log_tail()) absl::StrAppend(&out, Escape(line), "\n");
  return absl::StrCat(out, "</pre>\n");
}

}  // namespace

std::string CourseSection(const JobRecord& record) {
  const v1::Job& job = record.job;
  const v1::RestartCounts& restarts = job.restarts();
  const std::vector<Stretch> stretches = Stretches(record);
  const std::string words = absl::StrCat(
      "Submitted ", UtcTime(job.submitted_unix_millis()), " UTC",
      job.started_unix_millis() == 0
          ? ", not started"
          : absl::StrCat(", first started ", UtcTime(job.started_unix_millis())),
      job.ended_unix_millis() == 0 ? ""
                                   : absl::StrCat(", ended ", UtcTime(job.ended_unix_millis())),
      ". Restarts charged: ", restarts.infrastructure(), " to the infrastructure, ",
      restarts.application(), " to the job.", stretches.empty() ? "" : " Bars are attempts, ",
      stretches.empty() ? "" : "strokes events.");
  return RenderCard({"course", "Restarts and events", words,
                     absl::StrCat(CauseText(job),
                                  stretches.empty() ? ""
                                                    : RenderFigure(
                                                          [&](Canvas canvas) {
                                                            return CoursePicture(record, stretches,
                                                                                 canvas);
                                                          },
                                                          {.width = kWideWidth}, {}),
                                  AttemptTable(job), EventTable(job)),
                     true});
}

std::string CheckpointSection(const JobRecord& record) {
  const v1::Job& job = record.job;
  const auto describe = [](const v1::CheckpointRef& ref) {
    return absl::StrCat("step ", ref.step(), " of generation ", ref.generation(), ", ",
                        FormatBytes(ref.bytes()), ", written in ", Seconds(ref.write_seconds()));
  };
  std::string problems;
  int num_problems = 0;
  for (const v1::JobEvent& event : job.events())
    num_problems += event.kind() == "CHECKPOINT_PROBLEM";
  if (num_problems > 0) problems = absl::StrCat(num_problems, ", see the events");
  const v1::CheckpointSpec& spec = job.plan().spec().checkpoint();
  const std::string table = RenderTable(
      {{"newest", job.has_last_commit() ? describe(job.last_commit()) : "none was committed"},
       {"content", job.last_commit().content_sha256()},
       {"went on from", job.has_resume() ? describe(job.resume()) : ""},
       {"problems", problems},
       {"every",
        spec.path().empty() ? "" : absl::StrCat(FormatCount(spec.every_steps()), " steps")},
       {"folder", spec.path()}});
  return RenderCard({"checkpoints", "Checkpoints", "What the coordinator recorded.", table});
}

}  // namespace upipe::report
