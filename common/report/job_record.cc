#include "common/report/job_record.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "common/check.h"

namespace upipe::report {
namespace {

constexpr size_t kMostSamples = 720;
constexpr size_t kMostEvaluations = 256;

// Keeps every `stride`-th of what is taken; halves what there is when it is too much.
void KeepEvenly(const v1::StepReport& report, size_t most, int64_t& taken, int64_t& stride,
                std::vector<v1::StepReport>& kept) {
  if (taken++ % stride != 0) return;
  kept.push_back(report);
  if (kept.size() <= most) return;
  for (size_t i = 0; 2 * i < kept.size(); ++i) kept[i].Swap(&kept[2 * i]);
  kept.resize((kept.size() + 1) / 2);
  stride *= 2;
}

// Drops what was told of `step` and later ones.
void ForgetFrom(int64_t step, std::vector<v1::StepReport>& reports) {
  while (!reports.empty() && reports.back().step() >= step) reports.pop_back();
}

}  // namespace

void StepSeries::Take(v1::StepReport report, int64_t missing) {
  if (!points_.empty() && points_.back().step >= report.step()) {
    while (!points_.empty() && points_.back().step >= report.step()) points_.pop_back();
    ForgetFrom(report.step(), samples_);
    ForgetFrom(report.step(), evaluations_);
  }
  StepPoint point = {.step = report.step(),
                     .loss = report.loss(),
                     .grad_norm = report.grad_norm(),
                     .learning_rate = report.learning_rate(),
                     .tokens_per_second = report.tokens_per_second(),
                     .step_seconds = report.step_seconds(),
                     .comm_seconds = report.comm_seconds(),
                     .skipped = report.skipped()};
  if (report.has_held_out_loss()) point.held_out = report.held_out_loss();
  points_.push_back(point);
  missing_steps_ += missing;
  KeepEvenly(report, kMostSamples, taken_, stride_, samples_);
  if (report.has_held_out_loss()) {
    KeepEvenly(report, kMostEvaluations, evaluations_taken_, evaluation_stride_, evaluations_);
  }
  last_ = std::move(report);
}

std::vector<v1::StepReport> StepSeries::Samples() const {
  std::vector<v1::StepReport> all = samples_;
  all.insert(all.end(), evaluations_.begin(), evaluations_.end());
  if (!empty()) all.push_back(last_);
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& a, const auto& b) { return a.step() < b.step(); });
  all.erase(std::unique(all.begin(), all.end(),
                        [](const auto& a, const auto& b) { return a.step() == b.step(); }),
            all.end());
  return all;
}

std::string MethodTitle(v1::Method method) {
  switch (method) {
    case v1::METHOD_UPIPE:
      return "UPipe";
    case v1::METHOD_RING:
      return "Ring";
    case v1::METHOD_USP:
      return "USP";
    case v1::METHOD_FPDT:
      return "FPDT";
    default:
      return "Ulysses";
  }
}

int FullestRank(const v1::RunPlan& plan) {
  int fullest = 0;
  for (int rank = 1; rank < plan.ranks_size(); ++rank) {
    if (plan.ranks(rank).memory().peak_bytes() > plan.ranks(fullest).memory().peak_bytes())
      fullest = rank;
  }
  return fullest;
}

const v1::TagBytes* FindTag(const v1::MemoryUsage& memory, const std::string& tag) {
  for (const v1::TagBytes& bytes : memory.tags()) {
    if (bytes.tag() == tag) return &bytes;
  }
  return nullptr;
}

std::string StateOf(const v1::Job& job) {
  if (!job.shown_state().empty()) return job.shown_state();
  return std::string(absl::StripPrefix(v1::JobState_Name(job.state()), "JOB_STATE_"));
}

double CausalMfu(const v1::RunPlan& plan, double step_seconds) {
  const double peak = plan.peak_flops() * plan.ranks_size();
  if (!(peak > 0) || !(step_seconds > 0)) return 0;
  return plan.model_flops() / step_seconds / peak;
}

double Median(std::vector<double> values) {
  UPIPE_CHECK(!values.empty()) << "median of nothing";
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace upipe::report
