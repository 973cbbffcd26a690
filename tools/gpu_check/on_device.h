// What the check has a device do that is no op of its table: its own kernels and plain copies. With
// the CUDA backend on_device_cuda.cc is linked, else on_device_emulated.cc.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "kernels/api/stream.h"

struct CUstream_st;

namespace upipe::gpu_check {

// Puts what `launch` launches on the stream; errors surface there. `what` names it in messages: a
// string that is never freed.
void Issue(const char* what, std::function<absl::Status(CUstream_st*)> launch,
           kernels::Stream& stream);

// The library's copy between two places of device memory: the yardstick of memory bandwidth.
void CopyOnDevice(void* dst, const void* src, int64_t bytes, kernels::Stream& stream);

}  // namespace upipe::gpu_check
