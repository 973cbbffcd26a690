#include "coordinator/core/timing.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace upipe::coordinator {
namespace {

constexpr absl::Duration kLongest = absl::Hours(30 * 24);

}  // namespace

absl::Status Timing::Validate() const {
  std::vector<std::string> wrong;
  if (heartbeat < absl::Milliseconds(10) || heartbeat > absl::Hours(1)) {
    wrong.push_back(
        absl::StrCat("heartbeat is ", absl::FormatDuration(heartbeat), ", must be 10 ms to 1 h"));
  }
  for (const auto& [name, value] : {std::pair("kill bound", kill_bound),
                                    {"margin", margin},
                                    {"start deadline", start_deadline},
                                    {"autonomy", autonomy},
                                    {"first back-off", backoff_first},
                                    {"longest back-off", backoff_longest},
                                    {"stall floor", stall_floor},
                                    {"settle time", settle},
                                    {"drain grace", drain_grace}}) {
    if (value > absl::ZeroDuration() && value <= kLongest) continue;
    wrong.push_back(absl::StrCat(name, " is ", absl::FormatDuration(value),
                                 ", must be above 0 and at most ", absl::FormatDuration(kLongest)));
  }
  if (autonomy <= SuspectAfter()) {
    wrong.push_back(absl::StrCat("autonomy is ", absl::FormatDuration(autonomy),
                                 ", must be more than three heartbeats (",
                                 absl::FormatDuration(SuspectAfter()), ")"));
  }
  if (backoff_longest < backoff_first) {
    wrong.push_back(absl::StrCat("longest back-off is ", absl::FormatDuration(backoff_longest),
                                 ", must be at least the first one (",
                                 absl::FormatDuration(backoff_first), ")"));
  }
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(wrong, "; "));
}

absl::Duration Timing::Backoff(int fruitless) const {
  absl::Duration wait = backoff_first;
  for (int i = 0; i < fruitless && wait < backoff_longest; ++i) wait *= 2;
  return std::min(wait, backoff_longest);
}

absl::Duration StageDeadline(const v1::RunPlan& plan, const Timing& timing) {
  constexpr double kFlopsPerSecond = 1e9;
  const v1::ModelSpec& model = plan.spec().model();
  double step = 0;
  for (const v1::RankPlan& rank : plan.ranks()) step = std::max(step, rank.step_flops());
  const double stages = std::max(1, plan.schedule().stages_size());
  // A layer's share of a step holds every pass over it: more than any one of them.
  const double attention = step / std::max<double>(1, model.num_layers()) / stages;
  const double tokens = static_cast<double>(plan.tokens_per_rank());
  const double hidden = static_cast<double>(model.hidden_size());
  const double mlp = 12 * tokens * hidden * static_cast<double>(model.intermediate_size());
  const double loss = 6 * tokens * hidden * static_cast<double>(model.vocab_size());
  const double longest = std::max({attention, mlp, loss}) / kFlopsPerSecond;
  return std::max(timing.stall_floor, absl::Seconds(10 * longest));
}

absl::Duration CheckpointAllowance(const v1::RunPlan& plan) {
  constexpr double kBytesPerSecond = 100e6;
  double bytes = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    for (const v1::TagBytes& tag : rank.host_memory().tags()) {
      if (tag.tag() == "checkpoint") bytes += static_cast<double>(tag.peak_bytes());
    }
  }
  return absl::Seconds(bytes / kBytesPerSecond);
}

v1::Timing Timing::ToProto() const {
  v1::Timing proto;
  proto.set_heartbeat_millis(absl::ToInt64Milliseconds(heartbeat));
  proto.set_kill_bound_millis(absl::ToInt64Milliseconds(kill_bound));
  proto.set_autonomy_millis(absl::ToInt64Milliseconds(autonomy));
  proto.set_margin_millis(absl::ToInt64Milliseconds(margin));
  proto.set_start_deadline_millis(absl::ToInt64Milliseconds(start_deadline));
  return proto;
}

}  // namespace upipe::coordinator
