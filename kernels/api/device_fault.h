// A device that failed under its work: memory it may not touch, an uncorrectable memory error, a
// lost bus. Nothing more can be done on it by this process, which ends with the cause "device
// fault".
#pragma once

#include <string>

#include "absl/status/status.h"

namespace upipe::kernels {

inline constexpr char kDeviceFaultPrefix[] = "device fault: ";

// DataLoss, "device fault: WHAT".
absl::Status DeviceFault(const std::string& what);

// True for such an error, also when somebody has added words before or behind its message.
bool IsDeviceFault(const absl::Status& status);

}  // namespace upipe::kernels
