// Errors of the CUDA runtime as Status.
#pragma once

#include <driver_types.h>

#include "absl/status/status.h"

namespace upipe::kernels {

// `call` is what returned `error`. ResourceExhausted for memory, DeviceFault for errors that CUDA
// repeats for the rest of the process, Internal for others.
absl::Status CudaStatus(cudaError_t error, const char* call);

}  // namespace upipe::kernels
