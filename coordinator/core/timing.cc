#include "coordinator/core/timing.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace upipe::coordinator {

absl::Status Timing::Validate() const {
  std::vector<std::string> wrong;
  if (heartbeat < absl::Milliseconds(10) || heartbeat > absl::Hours(1)) {
    wrong.push_back(
        absl::StrCat("heartbeat is ", absl::FormatDuration(heartbeat), ", must be 10 ms to 1 h"));
  }
  if (kill_bound <= absl::ZeroDuration()) wrong.push_back("kill bound must be above 0");
  if (margin <= absl::ZeroDuration()) wrong.push_back("margin must be above 0");
  if (start_deadline <= absl::ZeroDuration()) wrong.push_back("start deadline must be above 0");
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
