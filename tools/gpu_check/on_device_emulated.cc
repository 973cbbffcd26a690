// Over a host device: its memory is this process's own, kernels run on the emulator.
#include <cuda_runtime.h>

#include <cstring>

#include "tools/gpu_check/on_device.h"

namespace upipe::gpu_check {

void Issue(const char* what, std::function<absl::Status(CUstream_st*)> launch,
           kernels::Stream& stream) {
  stream.Submit([what = std::string(what), launch = std::move(launch)](kernels::ExecContext&) {
    CUstream_st emulated;
    const absl::Status status = launch(&emulated);
    if (!status.ok() || emulated.error.empty()) return status;
    return absl::InternalError(what + ": " + emulated.error);
  });
}

void CopyOnDevice(void* dst, const void* src, int64_t bytes, kernels::Stream& stream) {
  stream.Submit([=](kernels::ExecContext&) {
    std::memcpy(dst, src, bytes);
    return absl::OkStatus();
  });
}

}  // namespace upipe::gpu_check
