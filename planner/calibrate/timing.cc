#include "planner/calibrate/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <utility>

#include "common/check.h"
#include "common/status.h"

namespace upipe::planner {
namespace {

constexpr int kMinRounds = 3;
constexpr int kMaxRounds = 101;
constexpr double kMaxCalls = 100'000;

double ThreadProcessorSeconds() {
  timespec time;
  UPIPE_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0) << "no processor clock";
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Has the stream's own thread write down its processor time when it gets there.
void MarkProcessorTime(kernels::Stream& stream, double* seconds) {
  stream.Submit([seconds](kernels::ExecContext&) {
    *seconds = ThreadProcessorSeconds();
    return absl::OkStatus();
  });
}

// Seconds of one call: of the team, or of the rank whose thread took longest.
absl::StatusOr<double> Sample(RankTeam& team, const Probe& probe, int calls, bool by_clock) {
  std::vector<double> started(team.size()), ended(team.size());
  UPIPE_ASSIGN_OR_RETURN(const double elapsed, team.Time([&](TeamRank& rank) -> absl::Status {
    kernels::Stream& stream = *(rank.context().streams().*probe.stream);
    const int index = rank.context().rank();
    if (!by_clock) MarkProcessorTime(stream, &started[index]);
    for (int i = 0; i < calls; ++i) UPIPE_RETURN_IF_ERROR(probe.enqueue(rank));
    if (!by_clock) MarkProcessorTime(stream, &ended[index]);
    return stream.Synchronize();
  }));
  if (by_clock) return elapsed / calls;
  double longest = 0;
  for (int i = 0; i < team.size(); ++i) longest = std::max(longest, ended[i] - started[i]);
  return longest / calls;
}

}  // namespace

double Quantile(std::vector<double> values, double share) {
  UPIPE_CHECK(!values.empty() && share >= 0 && share <= 1) << share << " of " << values.size();
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

double WorstSpread(const std::vector<Timing>& timings) {
  double worst = 1;
  for (const Timing& timing : timings) worst = std::max(worst, timing.spread);
  return worst;
}

absl::StatusOr<std::vector<Timing>> TimeInterleaved(RankTeam& team,
                                                    const std::vector<Probe>& probes,
                                                    const TimeBudget& budget) {
  const auto by_clock = [&](const Probe& probe) { return !budget.busy || probe.by_clock; };
  std::vector<int> calls;
  for (const Probe& probe : probes) {
    UPIPE_RETURN_IF_ERROR(Sample(team, probe, 1, true).status());
    UPIPE_ASSIGN_OR_RETURN(const double warm, Sample(team, probe, 1, by_clock(probe)));
    calls.push_back(static_cast<int>(
        std::clamp(std::ceil(budget.sample_seconds / std::max(warm, 1e-9)), 1.0, kMaxCalls)));
  }
  std::vector<std::vector<double>> samples(probes.size());
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [start] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  int rounds = 0;
  while (rounds < kMinRounds || (rounds < kMaxRounds && elapsed() < budget.seconds)) {
    for (size_t i = 0; i < probes.size(); ++i) {
      UPIPE_ASSIGN_OR_RETURN(samples[i].emplace_back(),
                             Sample(team, probes[i], calls[i], by_clock(probes[i])));
    }
    ++rounds;
  }
  std::vector<Timing> timings;
  for (size_t i = 0; i < probes.size(); ++i) {
    if (budget.busy && probes[i].by_clock) {
      timings.push_back({.seconds = Quantile(samples[i], 0.1), .rounds = rounds});
      continue;
    }
    timings.push_back({.seconds = Quantile(samples[i], 0.5),
                       .spread = Quantile(samples[i], 0.75) / Quantile(samples[i], 0.25),
                       .rounds = rounds});
  }
  return timings;
}

MatmulFit FitMatmul(const std::vector<double>& rows, const std::vector<double>& seconds,
                    double flops_per_row) {
  UPIPE_CHECK(rows.size() == seconds.size() && rows.size() >= 2)
      << rows.size() << " numbers of rows, " << seconds.size() << " times";
  // seconds = intercept + slope * rows, each equation divided by its seconds.
  double ww = 0, wr = 0, rr = 0, w = 0, r = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double weight = 1 / seconds[i];
    const double scaled = rows[i] / seconds[i];
    ww += weight * weight;
    wr += weight * scaled;
    rr += scaled * scaled;
    w += weight;
    r += scaled;
  }
  const double determinant = ww * rr - wr * wr;
  double intercept = (rr * w - wr * r) / determinant;
  double slope = (ww * r - wr * w) / determinant;
  if (!(determinant > 0) || intercept < 0 || !(slope > 0)) {  // no start-up to be seen
    intercept = 0;
    slope = r / rr;
  }
  return {.flops = flops_per_row / slope, .half_rows = intercept / slope};
}

}  // namespace upipe::planner
