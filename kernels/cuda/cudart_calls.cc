#include "kernels/cuda/cudart_calls.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/api/device_fault.h"
#include "kernels/cuda/cuda_status.h"

#define UPIPE_RETURN_IF_CUDA(call) UPIPE_RETURN_IF_ERROR(CudaStatus(call, #call))

namespace upipe::kernels {
namespace {

// The context is lost: whatever the process asks for next gets the same answer.
bool IsSticky(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorContained:
    case cudaErrorExternalDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

using WaitValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

class Cudart final : public CudaRuntime {
 public:
  Cudart(int ordinal, WaitValue32 wait_value) : ordinal_(ordinal), wait_value_(wait_value) {}

  absl::StatusOr<CudaDeviceFacts> Describe() override {
    UPIPE_RETURN_IF_ERROR(Here());
    cudaDeviceProp properties;
    UPIPE_RETURN_IF_CUDA(cudaGetDeviceProperties(&properties, ordinal_));
    CudaDeviceFacts facts;
    facts.name = properties.name;
    facts.ordinal = ordinal_;
    char address[32] = {};
    UPIPE_RETURN_IF_CUDA(cudaDeviceGetPCIBusId(address, sizeof(address), ordinal_));
    facts.pci_address = address;
    facts.multiprocessors = properties.multiProcessorCount;
    facts.row_stride_bytes_max = static_cast<int64_t>(properties.memPitch);
    size_t free_bytes = 0, total_bytes = 0;
    UPIPE_RETURN_IF_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    facts.free_bytes = static_cast<int64_t>(free_bytes);
    facts.total_bytes = static_cast<int64_t>(total_bytes);
    return facts;
  }

  absl::StatusOr<void*> AllocateDevice(int64_t bytes) override {
    UPIPE_RETURN_IF_ERROR(Here());
    void* memory = nullptr;
    UPIPE_RETURN_IF_CUDA(cudaMalloc(&memory, static_cast<size_t>(bytes)));
    return memory;
  }
  void FreeDevice(void* memory) override {
    Here().IgnoreError();
    cudaFree(memory);
  }
  absl::Status RegisterHost(void* begin, int64_t bytes) override {
    UPIPE_RETURN_IF_ERROR(Here());
    UPIPE_RETURN_IF_CUDA(
        cudaHostRegister(begin, static_cast<size_t>(bytes), cudaHostRegisterPortable));
    return absl::OkStatus();
  }
  void UnregisterHost(void* begin) override {
    Here().IgnoreError();
    cudaHostUnregister(begin);
  }
  // Unified addresses: the device sees mapped memory where the host does.
  absl::StatusOr<void*> AllocateMapped(int64_t bytes) override {
    UPIPE_RETURN_IF_ERROR(Here());
    void* memory = nullptr;
    UPIPE_RETURN_IF_CUDA(cudaHostAlloc(&memory, static_cast<size_t>(bytes),
                                       cudaHostAllocMapped | cudaHostAllocPortable));
    std::memset(memory, 0, static_cast<size_t>(bytes));
    return memory;
  }
  void FreeMapped(void* memory) override {
    Here().IgnoreError();
    cudaFreeHost(memory);
  }

  // Not ordered with the legacy default stream, which libraries may use.
  absl::StatusOr<CudaStreamHandle> CreateStream() override {
    UPIPE_RETURN_IF_ERROR(Here());
    cudaStream_t stream = nullptr;
    UPIPE_RETURN_IF_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
  }
  void DestroyStream(CudaStreamHandle stream) override {
    Here().IgnoreError();
    cudaStreamDestroy(stream);
  }
  absl::Status SynchronizeStream(CudaStreamHandle stream) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  // Whoever waits sleeps: ranks may outnumber cores.
  absl::StatusOr<CudaEventHandle> CreateEvent() override {
    UPIPE_RETURN_IF_ERROR(Here());
    cudaEvent_t event = nullptr;
    UPIPE_RETURN_IF_CUDA(
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
    return event;
  }
  absl::StatusOr<CudaEventHandle> CreateTimedEvent() override {
    UPIPE_RETURN_IF_ERROR(Here());
    cudaEvent_t event = nullptr;
    UPIPE_RETURN_IF_CUDA(cudaEventCreate(&event));
    return event;
  }
  void DestroyEvent(CudaEventHandle event) override {
    Here().IgnoreError();
    cudaEventDestroy(event);
  }
  absl::Status RecordEvent(CudaEventHandle event, CudaStreamHandle stream) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaEventRecord(event, stream), "cudaEventRecord");
  }
  absl::StatusOr<bool> EventDone(CudaEventHandle event) override {
    UPIPE_RETURN_IF_ERROR(Here());
    const cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) return false;
    UPIPE_RETURN_IF_ERROR(CudaStatus(error, "cudaEventQuery"));
    return true;
  }
  absl::Status SynchronizeEvent(CudaEventHandle event) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaEventSynchronize(event), "cudaEventSynchronize");
  }

  absl::StatusOr<int64_t> NanosBetween(CudaEventHandle begin, CudaEventHandle end) override {
    UPIPE_RETURN_IF_ERROR(Here());
    float milliseconds = 0;
    UPIPE_RETURN_IF_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    return static_cast<int64_t>(static_cast<double>(milliseconds) * 1e6);
  }

  absl::Status WaitEvent(CudaStreamHandle stream, CudaEventHandle event) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaStreamWaitEvent(stream, event, 0), "cudaStreamWaitEvent");
  }
  absl::Status WaitWord(CudaStreamHandle stream, uint32_t* word, uint32_t value) override {
    UPIPE_RETURN_IF_ERROR(Here());
    const CUresult result =
        wait_value_(stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS) return absl::OkStatus();
    // The driver's errors have the runtime's numbers where both know them.
    return CudaStatus(static_cast<cudaError_t>(result), "cuStreamWaitValue32");
  }
  absl::Status CopyRows(const RowsCopy& copy, CudaStreamHandle stream) override {
    UPIPE_RETURN_IF_ERROR(Here());
    if (copy.rows == 1) {
      return CudaStatus(cudaMemcpyAsync(copy.dst, copy.src, static_cast<size_t>(copy.row_bytes),
                                        cudaMemcpyDefault, stream),
                        "cudaMemcpyAsync");
    }
    return CudaStatus(
        cudaMemcpy2DAsync(copy.dst, static_cast<size_t>(copy.dst_stride), copy.src,
                          static_cast<size_t>(copy.src_stride), static_cast<size_t>(copy.row_bytes),
                          static_cast<size_t>(copy.rows), cudaMemcpyDefault, stream),
        "cudaMemcpy2DAsync");
  }
  absl::Status FillBytes(void* memory, unsigned char byte, int64_t bytes,
                         CudaStreamHandle stream) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaMemsetAsync(memory, byte, static_cast<size_t>(bytes), stream),
                      "cudaMemsetAsync");
  }
  absl::Status CallHost(CudaStreamHandle stream, void (*function)(void*), void* argument) override {
    UPIPE_RETURN_IF_ERROR(Here());
    return CudaStatus(cudaLaunchHostFunc(stream, function, argument), "cudaLaunchHostFunc");
  }

 private:
  // The device is the calling thread's from here on; nothing where it is already.
  absl::Status Here() const { return CudaStatus(cudaSetDevice(ordinal_), "cudaSetDevice"); }

  const int ordinal_;
  const WaitValue32 wait_value_;
};

}  // namespace

absl::Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();  // an error that is told once is told
  const std::string what =
      absl::StrCat(cudaGetErrorName(error), ": ", cudaGetErrorString(error), " (", call, ")");
  if (IsSticky(error)) return DeviceFault(what);
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(what);
  return absl::InternalError(what);
}

absl::StatusOr<std::shared_ptr<CudaRuntime>> OpenCudaRuntime(int ordinal) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess && error != cudaErrorNoDevice) {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine runs no CUDA: ", cudaGetErrorString(error),
                     "; install NVIDIA's driver for CUDA 13, or use backend cpu"));
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::FailedPreconditionError(absl::StrCat("no GPU ", ordinal, ": this process sees ",
                                                      count,
                                                      "; use backend cpu, or another machine"));
  }
  if (const cudaError_t taken = cudaSetDevice(ordinal); taken != cudaSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("GPU ", ordinal, " cannot be used: ", cudaGetErrorString(taken)));
  }
  void* wait_value = nullptr;
  cudaDriverEntryPointQueryResult found;
  UPIPE_RETURN_IF_CUDA(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &wait_value, 12000,
                                                        cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) {
    return absl::FailedPreconditionError(
        "NVIDIA's driver lacks cuStreamWaitValue32; install one for CUDA 13");
  }
  return std::make_shared<Cudart>(ordinal, reinterpret_cast<WaitValue32>(wait_value));
}

}  // namespace upipe::kernels
