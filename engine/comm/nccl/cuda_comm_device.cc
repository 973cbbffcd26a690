#include "engine/comm/nccl/cuda_comm_device.h"

#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "engine/comm/nccl/rank_sums.h"
#include "kernels/cuda/cuda_stream.h"
#include "kernels/cuda/cudart_calls.h"
#include "kernels/host/host_parallel_for.h"

namespace upipe::comm {
namespace {

using kernels::CudaRuntime;
using kernels::CudaStream;
using kernels::CudaStreamShared;

absl::Status StatusOf(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(call, ": ", cudaGetErrorString(error)));
}

// As nvidia-smi writes it, too.
std::string FormatUuid(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (int i = 0; i < 16; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppend(&text, absl::Hex(static_cast<unsigned char>(uuid.bytes[i]), absl::kZeroPad2));
  }
  return text;
}

// A timed event; a failed one counts no time.
class CudaMark final : public CommDevice::Mark {
 public:
  explicit CudaMark(kernels::Stream& stream) {
    CudaStream::Of(stream).Issue("the clock of a collective", [this](cudaStream_t handle) {
      UPIPE_RETURN_IF_ERROR(StatusOf(cudaEventCreate(&event_), "cudaEventCreate"));
      return StatusOf(cudaEventRecord(event_, handle), "cudaEventRecord");
    });
  }
  ~CudaMark() override {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  double SecondsSince(const Mark& earlier) const override {
    const cudaEvent_t begin = static_cast<const CudaMark&>(earlier).event_;
    float milliseconds = 0;
    if (begin == nullptr || event_ == nullptr ||
        cudaEventElapsedTime(&milliseconds, begin, event_) != cudaSuccess)
      return 0;
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

class CudaCommDevice final : public CommDevice {
 public:
  CudaCommDevice(std::string id, std::shared_ptr<CudaRuntime> runtime, std::string name)
      : id_(std::move(id)), runtime_(std::move(runtime)) {
    shared_ = std::make_shared<CudaStreamShared>(CudaStreamShared{
        .runtime = runtime_,
        .events = std::make_shared<kernels::CudaEventPool>(runtime_),
        .clock = std::make_shared<kernels::CudaClock>(runtime_),
        .parallel = std::make_shared<kernels::HostParallelFor>(1, std::vector<int>()),
        .device = std::move(name),
        .moment = [] { return std::string("a collective"); }});
  }

  std::string id() const override { return id_; }

  absl::StatusOr<int64_t> FreeBytes() override {
    UPIPE_ASSIGN_OR_RETURN(const kernels::CudaDeviceFacts facts, runtime_->Describe());
    return facts.free_bytes;
  }

  absl::StatusOr<std::shared_ptr<void>> Allocate(int64_t bytes) override {
    UPIPE_ASSIGN_OR_RETURN(void* memory, runtime_->AllocateDevice(bytes));
    return std::shared_ptr<void>(memory, [runtime = runtime_](void* p) { runtime->FreeDevice(p); });
  }

  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override {
    return std::make_unique<CudaStream>(std::move(name), shared_);
  }

  void Copy(void* to, const void* from, int64_t bytes, kernels::Stream& stream) override {
    CudaStream::Of(stream).Issue("a copy of a collective", [&](cudaStream_t handle) {
      return StatusOf(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle),
                      "cudaMemcpyAsync");
    });
  }

  void Sum(const OrderedSum& sum, kernels::Stream& stream) override {
    CudaStream::Of(stream).Issue("the sum of a collective", [&](cudaStream_t handle) {
      LaunchSum(sum, handle);
      return StatusOf(cudaGetLastError(), "the launch of a sum");
    });
  }

  void Combine(const Combination& combination, kernels::Stream& stream) override {
    CudaStream::Of(stream).Issue("the sum of a collective", [&](cudaStream_t handle) {
      LaunchCombine(combination, handle);
      return StatusOf(cudaGetLastError(), "the launch of a sum");
    });
  }

  std::unique_ptr<Mark> RecordMark(kernels::Stream& stream) override {
    return std::make_unique<CudaMark>(stream);
  }

 private:
  const std::string id_;
  const std::shared_ptr<CudaRuntime> runtime_;
  std::shared_ptr<const CudaStreamShared> shared_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CommDevice>> OpenCudaCommDevice(int ordinal) {
  UPIPE_ASSIGN_OR_RETURN(std::shared_ptr<CudaRuntime> runtime, kernels::OpenCudaRuntime(ordinal));
  cudaDeviceProp properties;
  UPIPE_RETURN_IF_ERROR(
      StatusOf(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties"));
  return std::make_unique<CudaCommDevice>(
      FormatUuid(properties.uuid), std::move(runtime),
      absl::StrCat("GPU ", ordinal, " (", properties.name, ")"));
}

}  // namespace upipe::comm
