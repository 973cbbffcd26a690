// A device for communicators whose memory is the host's: streams are threads, or CUDA streams over
// a runtime that is played, and sums run as tasks. Stands for a GPU in tests.
#pragma once

#include <memory>
#include <string>

#include "engine/comm/comm_device.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/host/host_stream.h"

namespace upipe::comm {

// A stream whose tasks run on its own thread only.
kernels::HostStream NewHostStream(std::string name);

class HostCommDevice final : public CommDevice {
 public:
  explicit HostCommDevice(std::string id, std::shared_ptr<kernels::CudaRuntime> runtime = nullptr);

  std::string id() const override { return id_; }
  // What was allocated is taken off it.
  absl::StatusOr<int64_t> FreeBytes() override { return free_bytes_; }
  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override;
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override;
  void Copy(void* to, const void* from, int64_t bytes, kernels::Stream& stream) override;
  void Sum(const OrderedSum& sum, kernels::Stream& stream) override;
  void Combine(const Combination& combination, kernels::Stream& stream) override;
  std::unique_ptr<Mark> RecordMark(kernels::Stream& stream) override;

 private:
  const std::string id_;
  const std::shared_ptr<const kernels::CudaStreamShared> cuda_;  // null: streams are threads
  int64_t free_bytes_ = int64_t{1} << 30;
};

}  // namespace upipe::comm
