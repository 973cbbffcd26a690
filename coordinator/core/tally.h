// What happened since this coordinator started, as the core counts it. Whoever exports it takes the
// differences; nothing here is stored.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "upipe/v1/job_service.pb.h"

namespace upipe::coordinator {

// Seconds up to which waits are counted together: from a small job on idle workers to days.
inline constexpr std::array<double, 12> kWaitBounds = {1,    3,    10,    30,    60,     300,
                                                       1800, 3600, 14400, 43200, 172800, 604800};

// How many waits were how long.
struct WaitCounts {
  std::array<int64_t, kWaitBounds.size() + 1> counts = {};  // by bound; the last one is beyond
  double seconds = 0;                                       // of all together

  void Add(absl::Duration wait);
};

struct Tally {
  // By what ended the attempt and the budget it was charged to: infrastructure, application, none.
  std::map<std::pair<v1::CauseKind, std::string>, int64_t> restarts;
  int64_t stalls = 0;
  int64_t commits = 0;
  int64_t checkpoint_problems = 0;
  int64_t lost_steps = 0;    // that no checkpoint held when their attempt ended without success
  double kept_seconds = 0;   // ranks x seconds of attempts up to a checkpoint, or to success
  double lost_seconds = 0;   // the rest of their time
  WaitCounts queue_waits;    // submit to first RUNNING
  WaitCounts restart_waits;  // from where an attempt began to end to RUNNING again
};

}  // namespace upipe::coordinator
