#include "client/progress.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/render.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr double kMeanSteps = 10;
constexpr size_t kTagWidth = 14;

std::string Bar(double fraction, size_t width) {
  const double clamped = std::clamp(std::isfinite(fraction) ? fraction : 0, 0.0, 1.0);
  const auto filled = static_cast<size_t>(std::floor(clamped * static_cast<double>(width)));
  return std::string(filled, '#') + std::string(width - filled, '.');
}

double Fraction(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

// "memory of rank 0: 1.0 MiB now, peak 3.0 MiB, planned 4.0 MiB", then a bar for each tag.
void AppendPool(const char* name, const v1::MemoryUsage& memory, int64_t planned_peak, size_t width,
                std::vector<std::string>& lines) {
  std::string heading = absl::StrCat("  ", name, ": ", FormatBytes(memory.current_bytes()),
                                     " now, peak ", FormatBytes(memory.peak_bytes()));
  if (planned_peak > 0) absl::StrAppend(&heading, ", planned ", FormatBytes(planned_peak));
  lines.push_back(heading);
  int64_t largest = 1;
  for (const v1::TagBytes& tag : memory.tags()) largest = std::max(largest, tag.peak_bytes());
  const size_t bar_width = std::clamp<size_t>(width, 56, 88) - 4 - kTagWidth - 26;
  for (const v1::TagBytes& tag : memory.tags()) {
    if (tag.peak_bytes() == 0) continue;
    lines.push_back(absl::StrFormat("    %-*s %s peak %s", static_cast<int>(kTagWidth), tag.tag(),
                                    Bar(Fraction(tag.peak_bytes(), largest), bar_width),
                                    FormatBytes(tag.peak_bytes())));
  }
}

}  // namespace

void Progress::Take(const v1::Job& job) {
  if (job.generation() != job_.generation()) {
    report_.reset();  // another attempt: its pace and step are its own
    seconds_per_step_ = 0;
  }
  job_ = job;
  if (job.has_last_report()) Take(job.last_report());
}

void Progress::Take(const v1::StepReport& report) {
  if (report_.has_value() && report.step() <= report_->step()) return;  // an older one, overtaken
  if (report.step_seconds() > 0) {
    seconds_per_step_ +=
        (report.step_seconds() - seconds_per_step_) / (seconds_per_step_ == 0 ? 1 : kMeanSteps);
  }
  if (report.has_held_out_loss()) {
    held_out_loss_ = report.held_out_loss();
    held_out_step_ = report.step();
  }
  report_ = report;
}

std::vector<std::string> Progress::TakeNewEvents() {
  std::vector<std::string> events;
  for (int i = FirstNewEvent(); i < job_.events_size(); ++i) {
    const v1::JobEvent& event = job_.events(i);
    const absl::Time time = absl::FromUnixMillis(event.unix_millis());
    events.push_back(Printable(
        absl::StrCat(absl::FormatTime("%H:%M:%S", time, absl::LocalTimeZone()), "  ", event.kind(),
                     event.message().empty() ? "" : "  ", event.message())));
    last_event_ = event;
  }
  return events;
}

// A record keeps its first event and the newest ones, so places move.
int Progress::FirstNewEvent() const {
  if (!last_event_.has_value()) return 0;
  for (int i = job_.events_size() - 1; i >= 0; --i) {
    const v1::JobEvent& event = job_.events(i);
    if (event.unix_millis() == last_event_->unix_millis() && event.kind() == last_event_->kind() &&
        event.message() == last_event_->message()) {
      return i + 1;
    }
  }
  return std::min(1, job_.events_size());
}

absl::Duration Progress::TimeLeft() const {
  if (!report_.has_value() || seconds_per_step_ == 0) return absl::InfiniteDuration();
  return absl::Seconds(seconds_per_step_ *
                       static_cast<double>(report_->total_steps() - report_->step()));
}

std::string Progress::Line() const {
  if (!report_.has_value()) return "";
  const v1::StepReport& report = *report_;
  std::string line =
      absl::StrFormat("step %d/%d  loss %.4f", report.step(), report.total_steps(), report.loss());
  if (held_out_loss_.has_value()) absl::StrAppendFormat(&line, "  held-out %.4f", *held_out_loss_);
  absl::StrAppend(&line, "  ", FormatCount(std::llround(report.tokens_per_second())),
                  " tokens/s  left ", FormatTimeSpan(TimeLeft()), "  memory ",
                  FormatBytes(report.memory().current_bytes()), " (peak ",
                  FormatBytes(report.memory().peak_bytes()), ")");
  if (report.host_memory().peak_bytes() > 0) {
    absl::StrAppend(&line, "  host ", FormatBytes(report.host_memory().current_bytes()), " (peak ",
                    FormatBytes(report.host_memory().peak_bytes()), ")");
  }
  if (report.skipped()) absl::StrAppend(&line, "  update skipped");
  return line;
}

std::string Progress::Heading(size_t width) const {
  std::string heading = absl::StrCat(job_.id(), "  ", ShownState(job_));
  if (job_.generation() > 1) absl::StrAppend(&heading, "  generation ", job_.generation());
  if (!report_.has_value()) return heading;
  const double done = Fraction(report_->step(), report_->total_steps());
  absl::StrAppend(&heading, "  step ", report_->step(), "/", report_->total_steps(), "  ");
  const size_t bar_width =
      heading.size() + 8 < width ? std::min<size_t>(40, width - heading.size() - 8) : 0;
  if (bar_width >= 5) absl::StrAppend(&heading, "[", Bar(done, bar_width), "] ");
  absl::StrAppendFormat(&heading, "%.0f %%", std::floor(done * 100));
  return heading;
}

std::string Progress::Course() const {
  std::vector<std::string> parts;
  if (const std::string restarts = RestartsText(job_); !restarts.empty()) {
    parts.push_back(restarts);
    if (job_.attempts_size() > 0) {
      parts.back() += absl::StrCat(
          ", last: ", Printable(job_.attempts(job_.attempts_size() - 1).cause().message()));
    }
  }
  if (job_.has_last_commit()) {
    parts.push_back(absl::StrCat("last checkpoint: ", CheckpointText(job_.last_commit())));
  }
  return absl::StrJoin(parts, "   ");
}

void Progress::AppendMemory(size_t width, std::vector<std::string>& lines) const {
  const bool planned = job_.plan().ranks_size() > 0;
  const v1::RankPlan plan = planned ? job_.plan().ranks(0) : v1::RankPlan();
  AppendPool("memory of rank 0", report_->memory(), plan.memory().peak_bytes(), width, lines);
  if (report_->host_memory().peak_bytes() == 0) return;
  AppendPool("host memory of rank 0", report_->host_memory(), plan.host_memory().peak_bytes(),
             width, lines);
}

std::vector<std::string> Progress::Block(size_t width) const {
  std::vector<std::string> lines = {Heading(width)};
  if (report_.has_value()) {
    std::string loss = absl::StrFormat("  loss %.4f nats", report_->loss());
    if (held_out_loss_.has_value()) {
      absl::StrAppendFormat(&loss, "   held-out %.4f (step %d)", *held_out_loss_, held_out_step_);
    }
    absl::StrAppendFormat(&loss, "   gradient norm %.3g   rate %.2e", report_->grad_norm(),
                          report_->learning_rate());
    lines.push_back(loss);
    lines.push_back(
        absl::StrCat("  ", FormatCount(std::llround(report_->tokens_per_second())), " tokens/s   ",
                     FormatTimeSpan(absl::Seconds(report_->step_seconds())), " a step, ",
                     FormatTimeSpan(absl::Seconds(report_->comm_seconds())),
                     " of it exchanging   left ", FormatTimeSpan(TimeLeft())));
    AppendMemory(width, lines);
  } else if (!job_.reason().empty()) {
    lines.push_back(absl::StrCat("  ", Printable(job_.reason())));
  }
  if (const std::string course = Course(); !course.empty()) lines.push_back("  " + course);
  for (std::string& line : lines) line.resize(std::min(line.size(), width));
  return lines;
}

}  // namespace upipe::client
