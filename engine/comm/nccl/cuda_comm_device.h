// A CUDA device as communicators see it. Its streams stand beside those of the rank's Device, which
// may come and go.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "engine/comm/comm_device.h"

namespace upipe::comm {

// Of the device with this ordinal among those the process sees. FailedPrecondition saying how many
// there are, or that there is no driver.
absl::StatusOr<std::unique_ptr<CommDevice>> OpenCudaCommDevice(int ordinal);

}  // namespace upipe::comm
