// The real CUDA runtime behind the seam runtime_calls.h.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/runtime_calls.h"

namespace upipe::kernels {

// Of the device with this ordinal among those the process sees. FailedPrecondition saying how many
// there are, or that there is no driver.
absl::StatusOr<std::shared_ptr<CudaRuntime>> OpenCudaRuntime(int ordinal);

}  // namespace upipe::kernels
