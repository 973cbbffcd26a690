#include "planner/calibrate/rates.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace upipe::planner {

std::string MeasuredSource(const RateOptions& options, const std::string& how, int rounds) {
  return absl::StrCat("measured: ", options.command, ": ", how,
                      rounds > 1 ? absl::StrCat(", ", rounds, " samples") : "");
}

double FourDigits(double value) {
  if (value == 0) return 0;
  const double decimals = 3 - std::floor(std::log10(std::abs(value)));
  const double scale = std::pow(10.0, std::abs(decimals));  // whole, so that the result is short
  return decimals > 0 ? std::round(value * scale) / scale : std::round(value / scale) * scale;
}

Probe OpProbe(RankTeam& team,
              const std::function<std::vector<kernels::OpParams>(TeamRank&)>& prepare) {
  std::vector<std::vector<kernels::OpParams>> by_rank;
  for (int i = 0; i < team.size(); ++i) by_rank.push_back(prepare(team.rank(i)));
  return {.enqueue = [by_rank = std::move(by_rank)](TeamRank& rank) -> absl::Status {
    for (const kernels::OpParams& params : by_rank[rank.context().rank()]) {
      UPIPE_RETURN_IF_ERROR(rank.context().Run(params));
    }
    return absl::OkStatus();
  }};
}

}  // namespace upipe::planner
