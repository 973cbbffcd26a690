// What a run came to, in numbers: summary.json and the lines the demo ends with. Pure.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/report/run_record.h"

namespace upipe::report {

// One memory category, of the fullest rank.
struct TagComparison {
  std::string tag;
  int64_t planned_bytes = 0;  // own peak
  int64_t measured_bytes = 0;
  int64_t ulysses_planned_bytes = 0;
};

struct Summary {
  std::string job;
  std::string state;         // "SUCCEEDED"
  int64_t steps = 0;         // done
  double final_loss = 0;     // of the last step's training tokens
  double held_out_loss = 0;  // last one; meaningless unless has_held_out
  bool has_held_out = false;
  double unigram_nats = 0;
  double bigram_nats = 0;
  double margin_nats = 0;                    // unigram - held out
  std::optional<double> needed_margin_nats;  // absent: the run is too short to demand one
  double tokens_per_second = 0;              // median over steps
  double step_seconds = 0;                   // median
  double comm_share = 0;                     // of rank 0's step seconds, median
  double run_seconds = 0;                    // started to ended
  int fullest_rank = 0;
  int64_t planned_peak_bytes = 0;
  int64_t measured_peak_bytes = 0;
  int64_t host_planned_peak_bytes = 0;  // of the pool of host memory, the largest over the ranks
  int64_t host_measured_peak_bytes = 0;
  bool memory_as_planned = false;    // every rank, pool and tag, to the byte
  std::vector<TagComparison> tags;   // tags that hold anything, in the order of the plan
  int64_t attention_peak_bytes = 0;  // joint peak of the attn_* tags, measured
  int64_t attention_planned_bytes = 0;
  int64_t ulysses_attention_planned_bytes = 0;
  int64_t ulysses_attention_measured_bytes = 0;  // 0 = not measured

  // Every reason why the run is not what it should be; empty = all is well.
  std::vector<std::string> failures;
};

Summary Summarize(const RunRecord& record, std::optional<double> needed_margin_nats);

nlohmann::json SummaryJson(const Summary& summary, const RunRecord& record);
// A few aligned lines for a terminal.
std::string SummaryText(const Summary& summary, const RunRecord& record);

// "0.74 under the unigram entropy".
std::string MarginText(const Summary& summary);

}  // namespace upipe::report
