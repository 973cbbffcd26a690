#include <cuda_runtime.h>

#include "kernels/cuda/cuda_stream.h"
#include "tools/gpu_check/on_device.h"

namespace upipe::gpu_check {
namespace {

absl::Status StatusOf(cudaError_t error) {
  return error == cudaSuccess ? absl::OkStatus() : absl::InternalError(cudaGetErrorString(error));
}

}  // namespace

void Issue(const char* what, std::function<absl::Status(CUstream_st*)> launch,
           kernels::Stream& stream) {
  auto* const cuda = dynamic_cast<kernels::CudaStream*>(&stream);
  if (cuda == nullptr) {
    stream.Submit([](kernels::ExecContext&) {
      return absl::FailedPreconditionError(
          "the check's own kernels run on a GPU in this build; rehearse with one without CUDA");
    });
    return;
  }
  cuda->Issue(what, [&](CUstream_st* handle) {
    const absl::Status status = launch(handle);
    return status.ok() ? StatusOf(cudaGetLastError()) : status;
  });
}

void CopyOnDevice(void* dst, const void* src, int64_t bytes, kernels::Stream& stream) {
  Issue(
      "copy",
      [=](CUstream_st* handle) {
        return StatusOf(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, handle));
      },
      stream);
}

}  // namespace upipe::gpu_check
