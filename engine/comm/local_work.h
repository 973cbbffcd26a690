// What a communicator does itself with the memory of its rank, between the messages: copies, and
// sums in ascending rank order. Blocking; on a device whose memory the host cannot touch the same
// runs on a stream of the communicator (comm_device.h).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "engine/comm/comm_device.h"
#include "engine/comm/communicator.h"

namespace upipe::comm {

// Used by one thread at a time.
class LocalWork {
 public:
  virtual ~LocalWork() = default;
  // Nothing where the two are one.
  virtual absl::Status Copy(void* to, const void* from, int64_t bytes) = 0;
  // sum[i] += values[i].
  virtual absl::Status Add(float* sum, const float* values, int64_t count) = 0;
  // values[i] = gathered[0][i] op gathered[1][i] op .., ascending.
  virtual absl::Status Combine(const Combination& combination) = 0;
};

// For memory the host can touch.
std::unique_ptr<LocalWork> CreateHostWork();
// On a stream of `device`.
std::unique_ptr<LocalWork> CreateDeviceWork(std::shared_ptr<CommDevice> device);

}  // namespace upipe::comm
