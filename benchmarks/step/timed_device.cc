#include "benchmarks/step/timed_device.h"

#include <ctime>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe::bench {

using kernels::ExecContext;
using kernels::MatmulParams;
using kernels::OpParams;
using kernels::Stream;

namespace {

constexpr char kNoOp[] = "copy or collective";

std::string ShapeOf(const OpParams& params) {
  const auto* p = std::get_if<MatmulParams>(&params);
  if (p == nullptr) return "";
  const int64_t depth = p->transpose_a ? p->a.shape[0] : p->a.shape[1];
  return absl::StrCat(p->c.shape[0], " x ", p->c.shape[1], " x ", depth, ", ",
                      p->transpose_a ? "t" : "n", p->transpose_b ? "t" : "n");
}

}  // namespace

double Seconds(Clock clock) {
  timespec time;
  const clockid_t id = clock == Clock::kWall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
  UPIPE_CHECK(clock_gettime(id, &time) == 0) << "clock " << id;
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void OpTime::Add(const OpTime& other) {
  calls += other.calls;
  seconds += other.seconds;
  cost.flops += other.cost.flops;
  cost.bytes_read += other.cost.bytes_read;
  cost.bytes_written += other.cost.bytes_written;
}

void StepProfile::Add(const OpKey& key, const OpTime& time) {
  const std::lock_guard lock(mutex_);
  times_[key].Add(time);
}

std::map<OpKey, OpTime> StepProfile::Take() {
  const std::lock_guard lock(mutex_);
  return std::exchange(times_, {});
}

// Knows which op the host thread is submitting; streams ask it for every task they are given.
class TimedOps final : public kernels::OpTable {
 public:
  explicit TimedOps(kernels::OpTable& ops) : ops_(ops) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return ops_.WorkspaceBytes(params);
  }
  absl::Status Enqueue(const OpParams& params, kernels::Workspace workspace,
                       Stream& stream) override {
    op_ = NameOf(params);
    shape_ = ShapeOf(params);
    cost_ = Cost(params);
    const absl::Status status = ops_.Enqueue(params, workspace, stream);
    op_ = kNoOp;
    shape_.clear();
    cost_ = {};
    return status;
  }

  OpKey Key(const std::string& stream) const {
    return {.stream = stream, .op = op_, .shape = shape_};
  }
  const kernels::OpCost& cost() const { return cost_; }

 private:
  kernels::OpTable& ops_;
  const char* op_ = kNoOp;
  std::string shape_;
  kernels::OpCost cost_;
};

namespace {

// Passes every task on, wrapped in two readings of the clock.
class TimedStream final : public Stream {
 public:
  TimedStream(std::unique_ptr<Stream> stream, const TimedOps& ops, StepProfile& profile)
      : stream_(std::move(stream)), ops_(ops), profile_(profile) {}

  const std::string& name() const override { return stream_->name(); }
  void Submit(kernels::Task task) override {
    OpTime time{.calls = 1, .seconds = 0, .cost = ops_.cost()};
    stream_->Submit([task = std::move(task), key = ops_.Key(name()), time,
                     &profile = profile_](ExecContext& context) mutable {
      const double start = Seconds(profile.clock());
      absl::Status status = task(context);
      time.seconds = Seconds(profile.clock()) - start;
      profile.Add(key, time);
      return status;
    });
  }
  kernels::Event Record() override { return stream_->Record(); }
  void Wait(const kernels::Event& event) override { stream_->Wait(event); }
  void Stamp(kernels::TimeStamp* stamp) override { stream_->Stamp(stamp); }

 private:
  const std::unique_ptr<Stream> stream_;
  const TimedOps& ops_;
  StepProfile& profile_;
};

}  // namespace

TimedDevice::TimedDevice(kernels::Device& device, Clock clock)
    : device_(device),
      profile_(clock),
      ops_(std::make_unique<TimedOps>(device.ops())),
      host_ops_(std::make_unique<TimedOps>(device.host_ops())) {}

TimedDevice::~TimedDevice() = default;

kernels::OpTable& TimedDevice::ops() { return *ops_; }

kernels::OpTable& TimedDevice::host_ops() { return *host_ops_; }

std::unique_ptr<Stream> TimedDevice::CreateStream(std::string name) {
  return std::make_unique<TimedStream>(device_.CreateStream(std::move(name)), *ops_, profile_);
}

std::unique_ptr<Stream> TimedDevice::CreateHostStream(std::string name) {
  return std::make_unique<TimedStream>(device_.CreateHostStream(std::move(name)), *host_ops_,
                                       profile_);
}

void TimedDevice::CopyRowsToHost(const kernels::RowsCopy& copy, Stream& stream) {
  device_.CopyRowsToHost(copy, stream);
}

void TimedDevice::CopyRowsFromHost(const kernels::RowsCopy& copy, Stream& stream) {
  device_.CopyRowsFromHost(copy, stream);
}

}  // namespace upipe::bench
