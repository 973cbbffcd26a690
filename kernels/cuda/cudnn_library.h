// cuDNN behind the seam sdpa_library.h: loaded when it is made, used through cudnn-frontend.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/cuda/sdpa_library.h"

namespace upipe::kernels {

// Its context is the device current here. FailedPrecondition when no cuDNN 9 can be loaded, or it
// is not `version`, "9.19", whose scratch a plan counts on.
absl::StatusOr<std::unique_ptr<SdpaLibrary>> OpenCudnn(const std::string& version);

}  // namespace upipe::kernels
