#include "kernels/api/device_fault.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace upipe::kernels {

absl::Status DeviceFault(const std::string& what) {
  return absl::DataLossError(absl::StrCat(kDeviceFaultPrefix, what));
}

bool IsDeviceFault(const absl::Status& status) {
  return absl::IsDataLoss(status) && absl::StrContains(status.message(), kDeviceFaultPrefix);
}

}  // namespace upipe::kernels
