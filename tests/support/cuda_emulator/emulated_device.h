// A GPU played on the CPU: host memory as the device's, our CUDA kernels on the emulator, the cpu
// backend's ops over host memory. For whole training steps of the backend "cuda" in tests.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device_factory.h"

namespace upipe::kernels {

// As CreateDevice does for "cuda" with our own attention, but takes test delays and poison too.
absl::StatusOr<std::unique_ptr<Device>> CreateEmulatedCudaDevice(const DeviceOptions& options);

}  // namespace upipe::kernels
