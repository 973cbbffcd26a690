#include "coordinator/core/tally.h"

#include <algorithm>

namespace upipe::coordinator {

void WaitCounts::Add(absl::Duration wait) {
  const double length = std::max(0.0, absl::ToDoubleSeconds(wait));
  const auto bound = std::lower_bound(kWaitBounds.begin(), kWaitBounds.end(), length);
  ++counts[bound - kWaitBounds.begin()];
  seconds += length;
}

}  // namespace upipe::coordinator
