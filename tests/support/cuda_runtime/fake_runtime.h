// A CUDA runtime whose streams are threads and whose device memory is ordinary memory: what a
// CudaDevice does with the real one, without a GPU. It is strict where CUDA is: copies may not
// leave registered blocks half way, host functions must not call it, and after a device fault
// nothing works.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "kernels/cuda/runtime_calls.h"
#include "kernels/host/host_stream.h"

namespace upipe::kernels::testing {

class FakeCudaRuntime final : public CudaRuntime {
 public:
  struct Options {
    int64_t total_bytes = int64_t{1} << 30;
    int64_t lockable_bytes = int64_t{1} << 30;  // of host memory
    std::optional<StreamDelay> delay;           // before everything a stream does
  };
  explicit FakeCudaRuntime(Options options);
  FakeCudaRuntime() : FakeCudaRuntime(Options()) {}
  ~FakeCudaRuntime() override;  // everything made must be gone

  // Every later call fails with DeviceFault(message), and no host function runs any more.
  void BreakDevice(const std::string& message);
  // Registered blocks of host memory, sizes by address; copies and events made so far.
  std::map<const char*, int64_t> registered() const;
  int copies() const { return copies_; }
  int events_made() const { return events_made_; }

  absl::StatusOr<CudaDeviceFacts> Describe() override;
  absl::StatusOr<void*> AllocateDevice(int64_t bytes) override;
  void FreeDevice(void* memory) override;
  absl::Status RegisterHost(void* begin, int64_t bytes) override;
  void UnregisterHost(void* begin) override;
  absl::StatusOr<void*> AllocateMapped(int64_t bytes) override;
  void FreeMapped(void* memory) override;
  absl::StatusOr<CudaStreamHandle> CreateStream() override;
  void DestroyStream(CudaStreamHandle stream) override;
  absl::Status SynchronizeStream(CudaStreamHandle stream) override;
  absl::StatusOr<CudaEventHandle> CreateEvent() override;
  absl::StatusOr<CudaEventHandle> CreateTimedEvent() override;
  void DestroyEvent(CudaEventHandle event) override;
  absl::Status RecordEvent(CudaEventHandle event, CudaStreamHandle stream) override;
  absl::StatusOr<bool> EventDone(CudaEventHandle event) override;
  absl::Status SynchronizeEvent(CudaEventHandle event) override;
  absl::StatusOr<int64_t> NanosBetween(CudaEventHandle begin, CudaEventHandle end) override;
  absl::Status WaitEvent(CudaStreamHandle stream, CudaEventHandle event) override;
  absl::Status WaitWord(CudaStreamHandle stream, uint32_t* word, uint32_t value) override;
  absl::Status CopyRows(const RowsCopy& copy, CudaStreamHandle stream) override;
  absl::Status FillBytes(void* memory, unsigned char byte, int64_t bytes,
                         CudaStreamHandle stream) override;
  absl::Status CallHost(CudaStreamHandle stream, void (*function)(void*), void* argument) override;

 private:
  absl::Status Status() const;  // of the device; a check failure inside a host function
  absl::Status CheckRegistered(const RowsCopy& copy) const;

  const Options options_;
  const std::shared_ptr<ParallelFor> parallel_;
  std::atomic<bool> broken_{false};
  std::atomic<int> copies_{0}, events_made_{0}, live_{0};
  mutable std::mutex mutex_;  // of what follows
  std::string fault_;
  std::map<const char*, int64_t> device_, registered_;
  std::map<void*, int64_t> mapped_;
};

}  // namespace upipe::kernels::testing
