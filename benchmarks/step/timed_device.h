// A device that also says where its streams' time goes: every task is timed on the stream's own
// thread and counted under the op that submitted it. Results are those of the device behind it.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/api/device.h"

namespace upipe::bench {

// The time of a stream's thread: of the clock on the wall, or the processor's (what other processes
// take does not count; neither does waiting for the other threads of a loop).
enum class Clock { kWall, kProcessor };
double Seconds(Clock clock);

// All calls of one kind. Arithmetic and bytes as kernels::Cost counts them.
struct OpTime {
  int64_t calls = 0;
  double seconds = 0;
  kernels::OpCost cost;

  void Add(const OpTime& other);
};

// What a task is counted under.
struct OpKey {
  std::string stream;
  std::string op;     // NameOf(params); "copy or collective" for tasks that no op submitted
  std::string shape;  // of a matmul "m x n x k, tn": which operands are stored transposed
  auto operator<=>(const OpKey&) const = default;
};

// Filled by the streams' threads.
class StepProfile {
 public:
  explicit StepProfile(Clock clock) : clock_(clock) {}
  Clock clock() const { return clock_; }
  void Add(const OpKey& key, const OpTime& time);
  // What was added since the last call. Synchronize the streams first.
  std::map<OpKey, OpTime> Take();

 private:
  const Clock clock_;
  std::mutex mutex_;  // of times_
  std::map<OpKey, OpTime> times_;
};

class TimedOps;

// Borrows the device. Driven by one host thread, as the engine drives a device.
class TimedDevice final : public kernels::Device {
 public:
  TimedDevice(kernels::Device& device, Clock clock);
  ~TimedDevice() override;

  std::string name() const override { return device_.name(); }
  kernels::Allocator& allocator() override { return device_.allocator(); }
  kernels::OpTable& ops() override;
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override;
  kernels::Allocator& host_allocator() override { return device_.host_allocator(); }
  kernels::OpTable& host_ops() override;
  std::unique_ptr<kernels::Stream> CreateHostStream(std::string name) override;
  void CopyRowsToHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override;
  void CopyRowsFromHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override;

  StepProfile& profile() { return profile_; }

 private:
  kernels::Device& device_;
  StepProfile profile_;
  const std::unique_ptr<TimedOps> ops_;
  const std::unique_ptr<TimedOps> host_ops_;
};

}  // namespace upipe::bench
