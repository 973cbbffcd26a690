// The demo's page: the page every job has (common/report), and beside it what is known of this
// run: the text's entropies, one step planned moment by moment, and the same model with
// DeepSpeed-Ulysses. Pure.
#pragma once

#include <string>
#include <vector>

#include "planner/timeline.h"
#include "tools/report/run_record.h"
#include "tools/report/summary.h"

namespace upipe::report {

struct PageInput {
  const RunRecord& record;
  const Summary& summary;
  std::vector<planner::TimelineMoment> step;          // of the fullest rank, thinned
  std::vector<planner::TimelineMoment> ulysses_step;  // of the same model with Ulysses
};

std::string RenderPage(const PageInput& input);

}  // namespace upipe::report
