// What calibration measures of one node, in parts: each times its candidates on the whole team and
// writes its numbers, with their sources, into a description. Rates are of one rank while the
// others do the same. Each part returns the worst spread among its timings.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/calibrate/rank_team.h"
#include "planner/calibrate/timing.h"
#include "upipe/v1/device.pb.h"

namespace upipe::planner {

struct RateOptions {
  bool quick = false;
  bool busy = false;    // as TimeBudget says
  std::string command;  // as it was called: "upipe calibrate --ranks 2"
  // Told what is about to be measured, and each result; a line without its end.
  std::function<void(const std::string& line)> say;
};

// "measured: <command>: <how>, of <rounds> samples".
std::string MeasuredSource(const RateOptions& options, const std::string& how, int rounds);

// To four digits: what is measured is not known better.
double FourDigits(double value);

// A probe that runs, on each rank, the ops `prepare` makes of it, in order, as the engine would.
// The ops' tensors belong to the rank.
Probe OpProbe(RankTeam& team,
              const std::function<std::vector<kernels::OpParams>(TeamRank&)>& prepare);

// matmul_bf16, matmul_fp32. compute_rates.cc, as the next.
absl::StatusOr<double> MeasureMatmul(RankTeam& team, const RateOptions& options,
                                     v1::DeviceFile& device);
// attention_bf16, attention_fp32.
absl::StatusOr<double> MeasureAttention(RankTeam& team, const RateOptions& options,
                                        v1::DeviceFile& device);
// memory_bandwidth, launch. memory_rates.cc, as the next.
absl::StatusOr<double> MeasureElementwise(RankTeam& team, const RateOptions& options,
                                          v1::DeviceFile& device);
// host_copy, host_update.
absl::StatusOr<double> MeasureHost(RankTeam& team, const RateOptions& options,
                                   v1::DeviceFile& device);
// exchange_in_node, exchange_between_nodes, exchange_latency, communicator, of `ranks` ranks, two
// at least: a team of its own, over what trainers talk through where this build has it.
absl::StatusOr<double> MeasureExchange(int ranks, const TeamOptions& team,
                                       const RateOptions& options, v1::DeviceFile& device);

// Device and host memory that the largest part takes of each rank.
inline constexpr int64_t kTeamArenaBytes = int64_t{640} << 20;
inline constexpr int64_t kTeamHostBytes = int64_t{128} << 20;

}  // namespace upipe::planner
