// How far apart the ranks of a job are in speed. Every rank of a step waits for the slowest, so
// step times are all alike: what tells is the time outside collectives, a rank's own.
#pragma once

#include <optional>

#include "coordinator/core/state.h"

namespace upipe::coordinator {

// Over the latest report of every rank, in seconds of its last step outside collectives.
struct OwnTimes {
  double median_seconds = 0;
  double max_seconds = 0;
  int slowest_rank = 0;  // the one that `max_seconds` is of; the lowest of equal ones
};

// None before a rank of the latest attempt has reported a step.
std::optional<OwnTimes> OwnTimesOf(const Job& job);

}  // namespace upipe::coordinator
