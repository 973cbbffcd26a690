// Invented jobs for the tests of pages and traces: an ordinary one with everything a page can show,
// and the ones that try to break it.
#pragma once

#include <string>
#include <vector>

#include "common/report/job_record.h"

namespace upipe::testing {

struct SampleOptions {
  std::string id = "demo-x3kqab";
  int ranks = 4;
  int steps = 240;
  int layers = 4;
  bool stages = true;  // steps tell what they spent where
  bool timeline = true;
  bool not_a_number = false;  // some losses and norms are none, one job-long stretch of them
  std::string words;          // where people's words go: reasons, nodes, causes, events, notes
};
report::JobRecord SampleRecord(const SampleOptions& options);

// A step of `layers` layers on three streams with memory of four categories.
v1::StepTimeline SampleTimeline(int rank, int64_t step, int layers);

// A job whose plan was refused.
report::JobRecord RefusedRecord();

}  // namespace upipe::testing
