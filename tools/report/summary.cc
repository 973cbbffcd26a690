#include "tools/report/summary.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/units.h"

namespace upipe::report {
namespace {

int64_t OwnPeak(const v1::MemoryUsage& memory, const std::string& tag) {
  const v1::TagBytes* bytes = FindTag(memory, tag);
  return bytes == nullptr ? 0 : bytes->peak_bytes();
}

bool AsPlanned(const v1::MemoryUsage& planned, const v1::MemoryUsage& measured) {
  if (planned.peak_bytes() != measured.peak_bytes()) return false;
  if (planned.attention_peak_bytes() != measured.attention_peak_bytes()) return false;
  return std::all_of(planned.tags().begin(), planned.tags().end(),
                     [&measured](const v1::TagBytes& tag) {
                       return tag.peak_bytes() == OwnPeak(measured, tag.tag());
                     });
}

void AddLoss(const RunRecord& record, Summary& summary) {
  const StepReports& reports = record.steps;
  summary.steps = reports.back().step();
  summary.final_loss = reports.back().loss();
  summary.unigram_nats = record.text.unigram_nats;
  summary.bigram_nats = record.text.bigram_nats;
  for (const v1::StepReport& report : reports) {
    if (!report.has_held_out_loss()) continue;
    summary.has_held_out = true;
    summary.held_out_loss = report.held_out_loss();
  }
  if (summary.has_held_out) summary.margin_nats = summary.unigram_nats - summary.held_out_loss;
}

void AddSpeed(const RunRecord& record, Summary& summary) {
  std::vector<double> seconds, rates, shares;
  for (const v1::StepReport& report : record.steps) {
    seconds.push_back(report.step_seconds());
    rates.push_back(report.tokens_per_second());
    shares.push_back(report.comm_seconds() / report.step_seconds());
  }
  summary.step_seconds = Median(seconds);
  summary.tokens_per_second = Median(rates);
  summary.comm_share = Median(shares);
  summary.run_seconds =
      static_cast<double>(record.job.ended_unix_millis() - record.job.started_unix_millis()) / 1e3;
}

void CheckPool(const char* pool, size_t rank, const v1::MemoryUsage& planned,
               const v1::MemoryUsage& measured, Summary& summary) {
  if (AsPlanned(planned, measured)) return;
  summary.memory_as_planned = false;
  summary.failures.push_back(absl::StrCat("rank ", rank, " used other ", pool,
                                          " than planned: peak ", measured.peak_bytes(),
                                          " bytes against ", planned.peak_bytes()));
}

void AddMemory(const RunRecord& record, Summary& summary) {
  const v1::RunPlan& plan = record.job.plan();
  const int rank = FullestRank(plan);
  const v1::MemoryUsage& planned = PlannedMemory(plan, rank);
  const v1::MemoryUsage& measured = record.ranks[rank].back().memory();
  const int ulysses_rank = FullestRank(record.ulysses);
  const v1::MemoryUsage& ulysses = PlannedMemory(record.ulysses, ulysses_rank);
  summary.fullest_rank = rank;
  summary.planned_peak_bytes = planned.peak_bytes();
  summary.measured_peak_bytes = measured.peak_bytes();
  for (const v1::TagBytes& tag : planned.tags()) {
    TagComparison row = {tag.tag(), tag.peak_bytes(), OwnPeak(measured, tag.tag()),
                         OwnPeak(ulysses, tag.tag())};
    if (row.planned_bytes + row.measured_bytes + row.ulysses_planned_bytes > 0)
      summary.tags.push_back(std::move(row));
  }
  summary.attention_planned_bytes = planned.attention_peak_bytes();
  summary.attention_peak_bytes = measured.attention_peak_bytes();
  summary.ulysses_attention_planned_bytes = ulysses.attention_peak_bytes();
  if (const auto run = record.ulysses_measured.find(ulysses_rank);
      run != record.ulysses_measured.end()) {
    summary.ulysses_attention_measured_bytes = run->second.attention_peak_bytes();
  }
  summary.memory_as_planned = true;
  for (size_t r = 0; r < record.ranks.size(); ++r) {
    const v1::RankPlan& rank_plan = plan.ranks(static_cast<int>(r));
    const v1::StepReport& report = record.ranks[r].back();
    CheckPool("memory", r, rank_plan.memory(), report.memory(), summary);
    CheckPool("host memory", r, rank_plan.host_memory(), report.host_memory(), summary);
    summary.host_planned_peak_bytes =
        std::max(summary.host_planned_peak_bytes, rank_plan.host_memory().peak_bytes());
    summary.host_measured_peak_bytes =
        std::max(summary.host_measured_peak_bytes, report.host_memory().peak_bytes());
  }
}

void CheckOutcome(Summary& summary, int64_t planned_steps) {
  if (summary.state != "SUCCEEDED")
    summary.failures.push_back(absl::StrCat("the job ended ", summary.state));
  if (summary.steps != planned_steps) {
    summary.failures.push_back(
        absl::StrCat("step records end at ", summary.steps, " of ", planned_steps));
  }
  if (!summary.has_held_out) {
    summary.failures.push_back("no held-out loss was measured");
  } else if (summary.needed_margin_nats && !(summary.margin_nats >= *summary.needed_margin_nats)) {
    summary.failures.push_back(absl::StrFormat(
        "held-out loss %.4f is %.4f nat under the unigram entropy %.4f; at least %.2f was expected",
        summary.held_out_loss, summary.margin_nats, summary.unigram_nats,
        *summary.needed_margin_nats));
  }
}

std::string Percent(double share) { return absl::StrFormat("%.1f %%", 100 * share); }

}  // namespace

std::string MarginText(const Summary& summary) {
  return absl::StrFormat("%.2f %s the unigram entropy", std::abs(summary.margin_nats),
                         summary.margin_nats >= 0 ? "under" : "over");
}

Summary Summarize(const RunRecord& record, std::optional<double> needed_margin_nats) {
  Summary summary;
  summary.job = record.job.id();
  summary.state =
      std::string(absl::StripPrefix(v1::JobState_Name(record.job.state()), "JOB_STATE_"));
  summary.needed_margin_nats = needed_margin_nats;
  AddLoss(record, summary);
  AddSpeed(record, summary);
  AddMemory(record, summary);
  CheckOutcome(summary, record.job.plan().spec().train().steps());
  return summary;
}

namespace {

// Of the last evaluation that told positions.
nlohmann::json HeldOutByPosition(const StepReports& steps) {
  nlohmann::json ranges = nlohmann::json::array();
  for (auto report = steps.rbegin(); report != steps.rend() && ranges.empty(); ++report) {
    for (const v1::PositionLoss& range : report->held_out_loss_by_position()) {
      ranges.push_back({{"begin", range.begin()},
                        {"end", range.end()},
                        {"loss", range.loss()},
                        {"tokens", range.tokens()}});
    }
  }
  return ranges;
}

}  // namespace

nlohmann::json SummaryJson(const Summary& summary, const RunRecord& record) {
  const v1::JobSpec& spec = record.job.plan().spec();
  nlohmann::json tags = nlohmann::json::object();
  for (const TagComparison& row : summary.tags) {
    tags[row.tag] = {{"planned_bytes", row.planned_bytes},
                     {"measured_bytes", row.measured_bytes},
                     {"ulysses_planned_bytes", row.ulysses_planned_bytes}};
  }
  nlohmann::json attention = {{"upipe_planned_bytes", summary.attention_planned_bytes},
                              {"upipe_measured_bytes", summary.attention_peak_bytes},
                              {"ulysses_planned_bytes", summary.ulysses_attention_planned_bytes}};
  if (summary.ulysses_attention_measured_bytes > 0) {
    attention["ulysses_measured_bytes"] = summary.ulysses_attention_measured_bytes;
  }
  return {
      {"job", summary.job},
      {"state", summary.state},
      {"ok", summary.failures.empty()},
      {"failures", summary.failures},
      {"steps", summary.steps},
      {"context_tokens", spec.train().context()},
      {"ranks", spec.parallel().ranks()},
      {"parameters", record.job.plan().num_parameters()},
      {"final_loss", summary.final_loss},
      {"held_out_loss",
       summary.has_held_out ? nlohmann::json(summary.held_out_loss) : nlohmann::json()},
      {"held_out_loss_by_position", HeldOutByPosition(record.steps)},
      {"unigram_nats", summary.unigram_nats},
      {"bigram_nats", summary.bigram_nats},
      {"margin_nats", summary.margin_nats},
      {"needed_margin_nats",
       summary.needed_margin_nats ? nlohmann::json(*summary.needed_margin_nats) : nlohmann::json()},
      {"tokens_per_second", summary.tokens_per_second},
      {"step_seconds_median", summary.step_seconds},
      {"communication_share_median", summary.comm_share},
      {"run_seconds", summary.run_seconds},
      {"memory",
       {{"fullest_rank", summary.fullest_rank},
        {"planned_peak_bytes", summary.planned_peak_bytes},
        {"measured_peak_bytes", summary.measured_peak_bytes},
        {"host_planned_peak_bytes", summary.host_planned_peak_bytes},
        {"host_measured_peak_bytes", summary.host_measured_peak_bytes},
        {"as_planned_to_the_byte", summary.memory_as_planned},
        {"tags", tags}}},
      {"attention_peak", attention},
      {"machine",
       {{"processor", record.machine.processor},
        {"cores", record.machine.cores},
        {"memory_bytes", record.machine.memory_bytes},
        {"kernel", record.machine.kernel}}},
      {"commit", record.commit},
  };
}

std::string SummaryText(const Summary& summary, const RunRecord& record) {
  const v1::JobSpec& spec = record.job.plan().spec();
  std::string text =
      absl::StrFormat("job        %s %s: %d steps of %s tokens on %d ranks, %s\n", summary.job,
                      summary.state, summary.steps, FormatTokenCount(spec.train().context()),
                      spec.parallel().ranks(), FormatTimeSpan(absl::Seconds(summary.run_seconds)));
  if (summary.has_held_out) {
    absl::StrAppendFormat(
        &text, "loss       training %.4f, held out %.4f nats: %s (%.4f); bigram is %.4f\n",
        summary.final_loss, summary.held_out_loss, MarginText(summary), summary.unigram_nats,
        summary.bigram_nats);
  }
  absl::StrAppendFormat(
      &text, "speed      %s tokens/s, %.2f s a step (median), %s of it in communication\n",
      FormatCount(static_cast<int64_t>(summary.tokens_per_second)), summary.step_seconds,
      Percent(summary.comm_share));
  absl::StrAppend(&text, "memory     peak of rank ", summary.fullest_rank, " ",
                  FormatBytes(summary.measured_peak_bytes), ", planned ",
                  FormatBytes(summary.planned_peak_bytes));
  if (summary.host_measured_peak_bytes > 0) {
    absl::StrAppend(&text, "; host memory ", FormatBytes(summary.host_measured_peak_bytes),
                    ", planned ", FormatBytes(summary.host_planned_peak_bytes));
  }
  absl::StrAppend(&text,
                  summary.memory_as_planned ? ": as planned on every rank, to the byte\n" : "\n");
  absl::StrAppend(&text, "attention  peak ", FormatBytes(summary.attention_peak_bytes), " with ",
                  MethodTitle(record.job.plan().spec().parallel().method()), ", ",
                  FormatBytes(summary.ulysses_attention_planned_bytes),
                  " with Ulysses for the same model\n");
  for (const std::string& failure : summary.failures)
    absl::StrAppend(&text, "FAILED     ", failure, "\n");
  return text;
}

}  // namespace upipe::report
