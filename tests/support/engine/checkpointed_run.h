// A job over packed text with checkpoints, its ranks as threads: what a generation of trainers does
// from claiming the folder to leaving, without daemons.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "engine/checkpoint/job_folder.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {

// Writes a small corpus of which MakeSpec's model, with vocab_size 257, can train.
void WriteSmallCorpus(const std::string& folder);

struct CheckpointedRun {
  v1::RunPlan plan;
  std::string job_id = "job";
  int64_t generation = 1;
  std::function<void(int rank, int64_t step)> on_step = {};
  std::function<void(int rank)> on_running = {};
  // Looked at by every rank; on_step may set it.
  std::atomic<bool>* stop = nullptr;
  std::function<absl::Status(int rank)> may_commit = {};
  bool retain = false;  // what a coordinator would order at each commit
  absl::Duration patience_at_end = {};
};

struct CheckpointedResult {
  absl::Status start;                      // of claiming and looking for what to go on from
  std::vector<absl::Status> statuses;      // [ranks]
  std::vector<v1::StepReport> reports;     // of rank 0
  std::vector<v1::CheckpointRef> commits;  // in order
  std::vector<v1::CheckpointProblem> problems;
  checkpoint::ResumeChoice choice;

  bool ok() const;
  std::string DebugString() const;
};

CheckpointedResult RunCheckpointed(const CheckpointedRun& run);

}  // namespace upipe::testing
