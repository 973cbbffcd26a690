// Everything a job's page is drawn from: the job as the coordinator tells it, its step records
// thinned as they are read, so that a hundred thousand steps cost no more than a few, and a
// measured step's timeline.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/plan.pb.h"
#include "upipe/v1/report.pb.h"
#include "upipe/v1/timeline.pb.h"

namespace upipe::report {

// The numbers of one step that are kept of every step.
struct StepPoint {
  int64_t step = 0;
  double loss = 0;
  std::optional<double> held_out;
  double grad_norm = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
  double step_seconds = 0;
  double comm_seconds = 0;
  bool skipped = false;
};

// One rank's steps, ascending. A step that comes again, after a restart from a checkpoint, takes
// the place of what was told from it on.
class StepSeries {
 public:
  // `missing` steps right before this one were not recorded.
  void Take(v1::StepReport report, int64_t missing = 0);

  bool empty() const { return points_.empty(); }
  const std::vector<StepPoint>& points() const { return points_; }
  // Whole reports, evenly spread over all, the first and the last among them: at most 1,000. Every
  // evaluation that fits is one of them.
  std::vector<v1::StepReport> Samples() const;
  const v1::StepReport& last() const { return last_; }  // not empty
  int64_t missing_steps() const { return missing_steps_; }

 private:
  std::vector<StepPoint> points_;
  std::vector<v1::StepReport> samples_;  // every `stride_`-th
  std::vector<v1::StepReport>
      evaluations_;  // every `evaluation_stride_`-th of those with a held-out loss
  v1::StepReport last_;
  int64_t stride_ = 1, evaluation_stride_ = 1;
  int64_t taken_ = 0, evaluations_taken_ = 0;
  int64_t missing_steps_ = 0;
};

struct JobRecord {
  v1::Job job;
  StepSeries steps;    // of rank 0, over all attempts
  StepSeries fullest;  // of the rank whose planned peak is highest; empty: not known
  std::optional<v1::StepTimeline> timeline;
  std::vector<std::string> missing;  // sentences: what should be on the page and could not be read
  std::vector<std::pair<std::string, std::string>> versions;  // of what, which
  int64_t made_unix_millis = 0;                               // when the record was read
};

// The method's name as people write it in a sentence.
std::string MethodTitle(v1::Method method);

// The rank whose planned peak is highest; the lowest of equals, 0 without a plan.
int FullestRank(const v1::RunPlan& plan);
// Null: not there.
const v1::TagBytes* FindTag(const v1::MemoryUsage& memory, const std::string& tag);
// "SUCCEEDED", "CANCELLING": what the coordinator shows.
std::string StateOf(const v1::Job& job);
// Of what one device can do, over the pairs the mask leaves; 0 when the plan knows no peak or the
// step took no time.
double CausalMfu(const v1::RunPlan& plan, double step_seconds);

// At least one value; those that are no number are left out, NaN when none is left.
double Median(std::vector<double> values);

}  // namespace upipe::report
