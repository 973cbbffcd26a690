#include "engine/train/check_communicator.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/units.h"

namespace upipe::train {

absl::Status CheckCommunicatorMemory(const v1::RunPlan& plan, int rank, int64_t bytes) {
  const int64_t reserved = plan.budget().reserved_bytes();
  if (reserved == 0) return absl::OkStatus();
  const int64_t arena = plan.ranks(rank).memory().arena_bytes();
  const int64_t unused = std::max<int64_t>(0, plan.budget().device_bytes() - arena);
  if (bytes <= reserved + unused) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "rank ", rank, ": the communicator of ", plan.spec().parallel().ranks(), " ranks took ",
      FormatBytes(bytes), " (", bytes, " bytes) of device memory, and the plan leaves ",
      FormatBytes(reserved + unused), " (", reserved + unused,
      " bytes) for it: ", FormatBytes(reserved), " that device ", plan.device(),
      " reserves outside arenas and ", FormatBytes(unused),
      " of the budget beside this rank's arena; raise `communicator` in the device's file and plan "
      "the job again, or use fewer ranks"));
}

}  // namespace upipe::train
