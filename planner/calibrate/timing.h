// How calibration times things: every candidate once a round, round after round, so that a machine
// whose speed drifts slows all of them alike, and the median of each. Also the line that is fitted
// through times of products.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/calibrate/rank_team.h"

namespace upipe::planner {

struct Probe {
  // Enqueues one call on a rank.
  std::function<absl::Status(TeamRank& rank)> enqueue;
  // Where it enqueues to.
  std::unique_ptr<kernels::Stream> engine::RankStreams::*stream = &engine::RankStreams::compute;
  // What several threads take part in: on a busy node too only a clock can time it.
  bool by_clock = false;
};

// How long a set of probes may take.
struct TimeBudget {
  double seconds = 1;         // rounds begin until then, 3 at least
  double sample_seconds = 0;  // of one sample: calls are repeated to fill it
  // The node does other work, which would count. What runs on one thread is timed by the processor
  // time of that thread; of what is timed by a clock, a sample that one in ten is faster than is
  // kept in place of the median.
  bool busy = false;
};

struct Timing {
  double seconds = 0;  // of one call, on every rank of the team at once
  // Third quartile of the samples over the first: what the machine's noise did. 1 where a fast
  // sample is kept.
  double spread = 1;
  int rounds = 0;
};

// One timing for each probe. A first round warms up, chooses how many calls make a sample, and is
// not counted.
absl::StatusOr<std::vector<Timing>> TimeInterleaved(RankTeam& team,
                                                    const std::vector<Probe>& probes,
                                                    const TimeBudget& budget);

// The largest spread; 1 of none.
double WorstSpread(const std::vector<Timing>& timings);

// The value below which a share of `values`, from 0 to 1, lies; between two it is interpolated. Not
// of none.
double Quantile(std::vector<double> values, double share);

struct MatmulFit {
  double flops = 0;      // FLOP/s of large products
  double half_rows = 0;  // rows at which half of that is reached; not negative
};
// The line seconds = (rows + half_rows) * flops_per_row / flops, fitted for the least sum of
// squared relative errors. At least two different numbers of rows, seconds above 0.
MatmulFit FitMatmul(const std::vector<double>& rows, const std::vector<double>& seconds,
                    double flops_per_row);

}  // namespace upipe::planner
