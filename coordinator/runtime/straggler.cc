#include "coordinator/runtime/straggler.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace upipe::coordinator {

std::optional<OwnTimes> OwnTimesOf(const Job& job) {
  if (!job.attempt) return std::nullopt;
  std::vector<std::pair<double, int>> times;  // slowest first, equal ones by rank
  for (int r = 0; r < job.attempt->record.ranks_size(); ++r) {
    const v1::StepReport& report = job.attempt->record.ranks(r).last_report();
    if (report.step() == 0) continue;
    times.emplace_back(-(report.step_seconds() - report.comm_seconds()), r);
  }
  if (times.empty()) return std::nullopt;
  std::sort(times.begin(), times.end());
  return OwnTimes{-times[times.size() / 2].first, -times[0].first, times[0].second};
}

}  // namespace upipe::coordinator
