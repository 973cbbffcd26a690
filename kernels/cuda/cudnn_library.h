// cuDNN behind the seam sdpa_library.h: loaded when it is made, used through cudnn-frontend.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/sdpa_library.h"

namespace upipe::kernels {

// Its context is the device current here. FailedPrecondition when no cuDNN 9 can be loaded, or one
// before 9.5, which cannot address packed documents by 64-bit offsets. What a later one has no plan
// for is told call by call.
absl::StatusOr<std::unique_ptr<SdpaLibrary>> OpenCudnn();

// Of the library that was loaded: "9.19.0".
std::string CudnnVersion();

}  // namespace upipe::kernels
