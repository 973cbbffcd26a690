#include "tests/support/engine/host_comm_device.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine/comm/ordered_sums.h"

namespace upipe::comm {
namespace {

class SingleThread final : public kernels::ParallelFor {
 public:
  int num_threads() const override { return 1; }
  void Run(int64_t count, const std::function<void(int64_t, int64_t, int)>& body) override {
    if (count > 0) body(0, count, 0);
  }
};

class HostMark final : public CommDevice::Mark {
 public:
  explicit HostMark(std::shared_ptr<std::atomic<int64_t>> nanos) : nanos_(std::move(nanos)) {}
  double SecondsSince(const Mark& earlier) const override {
    return static_cast<double>(*nanos_ - *static_cast<const HostMark&>(earlier).nanos_) * 1e-9;
  }

 private:
  const std::shared_ptr<std::atomic<int64_t>> nanos_;
};

std::shared_ptr<const kernels::CudaStreamShared> SharedOf(
    std::shared_ptr<kernels::CudaRuntime> runtime) {
  if (runtime == nullptr) return nullptr;
  return std::make_shared<kernels::CudaStreamShared>(
      kernels::CudaStreamShared{.runtime = runtime,
                                .events = std::make_shared<kernels::CudaEventPool>(runtime),
                                .clock = std::make_shared<kernels::CudaClock>(runtime),
                                .parallel = std::make_shared<SingleThread>(),
                                .device = "GPU 0",
                                .moment = [] { return std::string("a test"); }});
}

}  // namespace

HostCommDevice::HostCommDevice(std::string id, std::shared_ptr<kernels::CudaRuntime> runtime)
    : id_(std::move(id)), cuda_(SharedOf(std::move(runtime))) {}

kernels::HostStream NewHostStream(std::string name) {
  return kernels::HostStream(std::move(name), std::make_shared<SingleThread>(), std::nullopt, {});
}

absl::StatusOr<std::shared_ptr<void>> HostCommDevice::Allocate(int64_t bytes) {
  free_bytes_ -= bytes;
  return std::shared_ptr<void>(std::calloc(1, bytes), &std::free);
}

std::unique_ptr<kernels::Stream> HostCommDevice::CreateStream(std::string name) {
  return std::unique_ptr<kernels::Stream>(new kernels::HostStream(NewHostStream(std::move(name))));
}

void HostCommDevice::Copy(void* to, const void* from, int64_t bytes, kernels::Stream& stream) {
  stream.Submit([=](kernels::ExecContext&) {
    std::memmove(to, from, bytes);
    return absl::OkStatus();
  });
}

void HostCommDevice::Sum(const OrderedSum& sum, kernels::Stream& stream) {
  stream.Submit([sum](kernels::ExecContext&) {
    size_t next = 0;
    if (!sum.accumulate) std::memmove(sum.sum, sum.terms[next++], sum.count * sizeof(float));
    for (; next < sum.terms.size(); ++next) AddTo(sum.sum, sum.terms[next], sum.count);
    return absl::OkStatus();
  });
}

void HostCommDevice::Combine(const Combination& combination, kernels::Stream& stream) {
  stream.Submit([combination](kernels::ExecContext&) {
    CombineOnHost(combination);
    return absl::OkStatus();
  });
}

std::unique_ptr<CommDevice::Mark> HostCommDevice::RecordMark(kernels::Stream& stream) {
  auto nanos = std::make_shared<std::atomic<int64_t>>(0);
  stream.Submit([nanos](kernels::ExecContext&) {
    *nanos = std::chrono::steady_clock::now().time_since_epoch().count();
    return absl::OkStatus();
  });
  return std::make_unique<HostMark>(std::move(nanos));
}

}  // namespace upipe::comm
