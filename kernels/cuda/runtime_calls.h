// What devices and streams ask of the CUDA runtime, as a seam: the real one is cudart_calls.h, the
// fake of the tests runs on threads (tests/support/cuda_runtime). So streams, events, pools and
// error rules are compiled and tested on machines without CUDA; this header names CUDA's handles
// and includes none of its headers.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/device.h"

struct CUstream_st;  // what cudaStream_t and cudaEvent_t point to
struct CUevent_st;

namespace upipe::kernels {

using CudaStreamHandle = CUstream_st*;
using CudaEventHandle = CUevent_st*;

struct CudaDeviceFacts {
  std::string name;         // "NVIDIA H200"
  int ordinal = 0;          // among those this process sees
  std::string pci_address;  // "0000:1b:00.0"
  int multiprocessors = 0;
  int64_t total_bytes = 0;
  int64_t free_bytes = 0;            // when asked
  int64_t row_stride_bytes_max = 0;  // of one copy of rows
};

// Of one device. Errors: ResourceExhausted for memory, DeviceFault (kernels/api/device_fault.h)
// once the device has failed, which then is every call's answer, else Internal. Thread-safe, but
// for a stream, which one thread at a time uses.
class CudaRuntime {
 public:
  virtual ~CudaRuntime() = default;
  virtual absl::StatusOr<CudaDeviceFacts> Describe() = 0;

  virtual absl::StatusOr<void*> AllocateDevice(int64_t bytes) = 0;
  virtual void FreeDevice(void* memory) = 0;
  // Pins ordinary memory, page aligned, for copies.
  virtual absl::Status RegisterHost(void* begin, int64_t bytes) = 0;
  virtual void UnregisterHost(void* begin) = 0;
  // A few pinned, zeroed bytes that the device and the host see at one address.
  virtual absl::StatusOr<void*> AllocateMapped(int64_t bytes) = 0;
  virtual void FreeMapped(void* memory) = 0;

  virtual absl::StatusOr<CudaStreamHandle> CreateStream() = 0;
  virtual void DestroyStream(CudaStreamHandle stream) = 0;
  virtual absl::Status SynchronizeStream(CudaStreamHandle stream) = 0;
  virtual absl::StatusOr<CudaEventHandle> CreateEvent() = 0;
  // One that knows when it was passed.
  virtual absl::StatusOr<CudaEventHandle> CreateTimedEvent() = 0;
  virtual void DestroyEvent(CudaEventHandle event) = 0;
  virtual absl::Status RecordEvent(CudaEventHandle event, CudaStreamHandle stream) = 0;
  virtual absl::StatusOr<bool> EventDone(CudaEventHandle event) = 0;
  virtual absl::Status SynchronizeEvent(CudaEventHandle event) = 0;
  // Of two timed events that were passed; negative when `end` was first.
  virtual absl::StatusOr<int64_t> NanosBetween(CudaEventHandle begin, CudaEventHandle end) = 0;

  // Stream-ordered.
  virtual absl::Status WaitEvent(CudaStreamHandle stream, CudaEventHandle event) = 0;
  // Holds the stream until *word - value, as a signed number, is not negative. `word` is mapped
  // memory.
  virtual absl::Status WaitWord(CudaStreamHandle stream, uint32_t* word, uint32_t value) = 0;
  // One side is device memory. Strides up to row_stride_bytes_max.
  virtual absl::Status CopyRows(const RowsCopy& copy, CudaStreamHandle stream) = 0;
  // Every byte of device memory.
  virtual absl::Status FillBytes(void* memory, unsigned char byte, int64_t bytes,
                                 CudaStreamHandle stream) = 0;
  // Calls function(argument) on a thread of the runtime's own; neither may call CUDA. Never called
  // once the device has failed.
  virtual absl::Status CallHost(CudaStreamHandle stream, void (*function)(void*),
                                void* argument) = 0;
};

}  // namespace upipe::kernels
