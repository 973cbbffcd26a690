#include "coordinator/core/timing.h"

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
                                    {"autonomy", autonomy}}) {
    if (value > absl::ZeroDuration() && value <= kLongest) continue;
    wrong.push_back(absl::StrCat(name, " is ", absl::FormatDuration(value),
                                 ", must be above 0 and at most ", absl::FormatDuration(kLongest)));
  }
  if (autonomy <= SuspectAfter()) {
    wrong.push_back(absl::StrCat("autonomy is ", absl::FormatDuration(autonomy),
                                 ", must be more than three heartbeats (",
                                 absl::FormatDuration(SuspectAfter()), ")"));
  }
  if (wrong.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrJoin(wrong, "; "));
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
