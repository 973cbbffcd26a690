#include "engine/comm/local_work.h"

#include <cstring>
#include <utility>

#include "engine/comm/ordered_sums.h"

namespace upipe::comm {
namespace {

class HostWork final : public LocalWork {
 public:
  absl::Status Copy(void* to, const void* from, int64_t bytes) override {
    if (to != from && bytes > 0) std::memmove(to, from, bytes);
    return absl::OkStatus();
  }
  absl::Status Add(float* sum, const float* values, int64_t count) override {
    AddTo(sum, values, count);
    return absl::OkStatus();
  }
  absl::Status Combine(const Combination& combination) override {
    CombineOnHost(combination);
    return absl::OkStatus();
  }
};

class DeviceWork final : public LocalWork {
 public:
  explicit DeviceWork(std::shared_ptr<CommDevice> device)
      : device_(std::move(device)), stream_(device_->CreateStream("comm work")) {}

  absl::Status Copy(void* to, const void* from, int64_t bytes) override {
    if (to == from || bytes == 0) return absl::OkStatus();
    device_->Copy(to, from, bytes, *stream_);
    return stream_->Synchronize();
  }
  absl::Status Add(float* sum, const float* values, int64_t count) override {
    device_->Sum({.terms = {values}, .accumulate = true, .count = count, .sum = sum}, *stream_);
    return stream_->Synchronize();
  }
  absl::Status Combine(const Combination& combination) override {
    device_->Combine(combination, *stream_);
    return stream_->Synchronize();
  }

 private:
  const std::shared_ptr<CommDevice> device_;
  const std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace

std::unique_ptr<LocalWork> CreateHostWork() { return std::make_unique<HostWork>(); }

std::unique_ptr<LocalWork> CreateDeviceWork(std::shared_ptr<CommDevice> device) {
  return std::make_unique<DeviceWork>(std::move(device));
}

}  // namespace upipe::comm
