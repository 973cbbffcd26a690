// Everything known of one finished run, read from the files it left: the job as `upipe describe -o
// json` prints it, the coordinator's and each rank's step records (docs/metrics.md), the packed
// data's manifest; and the same model planned with DeepSpeed-Ulysses.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/report/job_record.h"
#include "upipe/v1/job_service.pb.h"
#include "upipe/v1/plan.pb.h"
#include "upipe/v1/report.pb.h"

namespace upipe::report {

// The held-out text: what a model that knows only frequencies would reach.
struct HeldOutText {
  int64_t tokens = 0;
  double unigram_nats = 0;
  double bigram_nats = 0;
  int64_t train_tokens = 0;
  int64_t documents = 0;
  std::string source;  // what was packed
};

struct Machine {
  std::string processor;
  int cores = 0;
  int64_t memory_bytes = 0;
  std::string kernel;
};

using StepReports = std::vector<v1::StepReport>;  // of one rank, ascending steps

struct RunFiles {
  std::string job;              // JSON of v1.Job
  std::string state_dir;        // holds the coordinator's and every worker's state folder
  std::string data_dir;         // packed folder
  std::string ulysses_metrics;  // of `upipe run --metrics`; "" = Ulysses was only planned
  std::string commit;
};

struct RunRecord {
  v1::Job job;
  StepReports steps;                         // of rank 0, as the coordinator kept them
  std::vector<StepReports> ranks;            // [job.spec.parallel.ranks], as the workers did
  std::optional<v1::StepTimeline> timeline;  // the newest of the fullest rank
  HeldOutText text;
  v1::RunPlan ulysses;
  std::map<int, v1::MemoryUsage> ulysses_measured;  // by rank; empty = only planned
  Machine machine;
  std::string commit;
};

// NotFound, or DataLoss naming file and line. A run without a single step of every rank is
// FailedPrecondition.
absl::StatusOr<RunRecord> ReadRun(const RunFiles& files);

// The spec with method ulysses and no more changed than that asks for.
v1::JobSpec AsUlysses(v1::JobSpec spec);

const v1::MemoryUsage& PlannedMemory(const v1::RunPlan& plan, int rank);

}  // namespace upipe::report
