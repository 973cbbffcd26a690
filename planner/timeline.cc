#include "planner/timeline.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/rounding.h"
#include "common/status.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/train/measured_workspaces.h"
#include "engine/train/step.h"
#include "kernels/backends.h"

namespace upipe::planner {
namespace {

// Calls back before every op.
class WatchedOpTable final : public kernels::OpTable {
 public:
  WatchedOpTable(kernels::OpTable& ops, std::function<void()> before_op)
      : ops_(ops), before_op_(std::move(before_op)) {}

  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    return ops_.WorkspaceBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return ops_.AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace workspace,
                       kernels::Stream& stream) override {
    before_op_();
    return ops_.Enqueue(params, workspace, stream);
  }

 private:
  kernels::OpTable& ops_;
  const std::function<void()> before_op_;
};

// The dry device, watched.
class WatchedDevice final : public kernels::Device {
 public:
  WatchedDevice(kernels::DryDevice& device, std::function<void()> before_op)
      : device_(device), ops_(device.ops(), std::move(before_op)) {}

  std::string name() const override { return device_.name(); }
  kernels::Allocator& allocator() override { return device_.allocator(); }
  kernels::OpTable& ops() override { return ops_; }
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override {
    return device_.CreateStream(std::move(name));
  }
  kernels::Allocator& host_allocator() override { return device_.host_allocator(); }
  kernels::OpTable& host_ops() override { return device_.host_ops(); }
  std::unique_ptr<kernels::Stream> CreateHostStream(std::string name) override {
    return device_.CreateHostStream(std::move(name));
  }
  void CopyRowsToHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsToHost(copy, stream);
  }
  void CopyRowsFromHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsFromHost(copy, stream);
  }

 private:
  kernels::DryDevice& device_;
  WatchedOpTable ops_;
};

int64_t BytesSent(const comm::DryTraffic& traffic) {
  int64_t bytes = 0;
  for (int kind = 0; kind < comm::kNumTrafficKinds; ++kind) {
    for (const bool beside : {false, true}) {
      for (const bool leaves_node : {false, true}) {
        const comm::TrafficCount& count = traffic.at({.kind = static_cast<comm::TrafficKind>(kind),
                                                      .beside_compute = beside,
                                                      .leaves_node = leaves_node});
        bytes += count.bytes_in_node + count.bytes_between_nodes;
      }
    }
  }
  return bytes;
}

// A moment is recorded in windows of equally many ops, fewer than this: whenever there would be as
// many, neighbours are merged, so that no moment's length need be known.
constexpr size_t kWindows = 4;

// Takes what happened from the device and the communicator, whose counts begin anew with every
// moment and the pools' peaks with every window.
class TimelineRecorder final : public engine::MomentObserver {
 public:
  TimelineRecorder(kernels::DryDevice& device, comm::DryCommunicator& comm,
                   const PriceMoment& price)
      : device_(device), price_(price) {
    device.CountInto(&counts_.ops);
    comm.CountInto(&counts_.traffic);
  }

  void Begin(const engine::Moment& moment) override {
    if (current_ == moment) return;
    End();
    current_ = moment;
  }

  void BeforeOp() {
    if (current_ && ops_in_window_ == window_ops_) CloseWindow();
    ++ops_in_window_;
  }

  void End() {
    if (!current_) return;
    CloseWindow();
    ShareOut();
    timeline_.moments.insert(timeline_.moments.end(), windows_.begin(), windows_.end());
    windows_.clear();
    window_ops_ = 1;
    done_ = {};
    counts_ = {};
    current_.reset();
  }

  // Or the first error of a price.
  absl::StatusOr<Timeline> Take() && {
    UPIPE_RETURN_IF_ERROR(error_);
    timeline_.timed = price_ != nullptr;
    timeline_.arena_bytes = device_.allocator().stats().arena_high_water_bytes;
    timeline_.host_pool_bytes = device_.host_allocator().stats().arena_high_water_bytes;
    timeline_.moments = Thin(timeline_.moments, kMostMoments);
    return std::move(timeline_);
  }

 private:
  void CloseWindow() {
    const kernels::DryCounts& counts = counts_.ops;
    const kernels::DryOpCount total = counts.total();
    TimelineMoment window = {
        .at = *current_,
        .device = TakePool(device_.allocator(), timeline_.device_peaks),
        .host = TakePool(device_.host_allocator(), timeline_.host_peaks),
        .ops = total.calls - done_.ops,
        .flops = total.cost.flops - done_.flops,
        .bytes_to_host = counts.bytes_to_host - done_.bytes_to_host,
        .bytes_from_host = counts.bytes_from_host - done_.bytes_from_host,
    };
    done_ = {.ops = total.calls,
             .flops = total.cost.flops,
             .bytes_to_host = counts.bytes_to_host,
             .bytes_from_host = counts.bytes_from_host};
    windows_.push_back(window);
    ops_in_window_ = 0;
    if (windows_.size() < kWindows) return;
    for (size_t i = 0; i < kWindows / 2; ++i) {
      windows_[i] = windows_[2 * i];
      Absorb(windows_[i], windows_[2 * i + 1]);
    }
    windows_.resize(kWindows / 2);
    window_ops_ *= 2;
  }

  // Time of the whole moment goes to its windows by their part of its FLOPs; traffic to the last.
  void ShareOut() {
    windows_.back().bytes_sent = BytesSent(counts_.traffic);
    if (!price_) return;
    const absl::StatusOr<MomentSeconds> seconds = price_({*current_, counts_});
    if (!seconds.ok()) {
      error_.Update(seconds.status());
      return;
    }
    const double flops = counts_.ops.total().cost.flops;
    for (TimelineMoment& window : windows_) {
      const double part =
          flops > 0 ? window.flops / flops : 1.0 / static_cast<double>(windows_.size());
      window.seconds = {.elapsed = part * seconds->elapsed,
                        .compute = part * seconds->compute,
                        .exchange = part * seconds->exchange,
                        .copies = part * seconds->copies};
    }
  }

  static PoolMoment TakePool(kernels::Allocator& allocator, kernels::TagBytes& peaks) {
    const kernels::MemoryStats stats = allocator.stats();
    allocator.ResetPeaks();
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      peaks[tag] = std::max(peaks[tag], stats.peak_bytes[tag]);
    }
    return {.bytes = stats.at_peak_bytes, .total_bytes = stats.peak_total_bytes};
  }

  kernels::DryDevice& device_;
  const PriceMoment& price_;
  SectionCounts counts_;  // of the current moment
  std::optional<engine::Moment> current_;
  std::vector<TimelineMoment> windows_;  // of the current moment
  TimelineMoment done_;                  // sums of those
  int64_t window_ops_ = 1;
  int64_t ops_in_window_ = 0;
  absl::Status error_;
  Timeline timeline_;
};

// What the step does, in the order of a run.
absl::Status RunStep(const engine::RankContext& context, const v1::RunPlan& plan) {
  UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
  UPIPE_RETURN_IF_ERROR(step->Vote({}).status());
  const std::vector<train::HostTokens> micro_steps(plan.spec().train().gradient_accumulation());
  UPIPE_RETURN_IF_ERROR(step->Run(1, micro_steps).status());
  if (plan.spec().train().eval_sequences() == 0) return absl::OkStatus();
  return step->Evaluate(1, {}).status();
}

template <typename Bytes>
size_t Fullest(const std::vector<TimelineMoment>& moments, Bytes bytes) {
  UPIPE_CHECK(!moments.empty()) << "a timeline without moments";
  return std::max_element(moments.begin(), moments.end(),
                          [&](const auto& a, const auto& b) { return bytes(a) < bytes(b); }) -
         moments.begin();
}

}  // namespace

absl::StatusOr<Timeline> RecordTimeline(const v1::RunPlan& plan, int rank,
                                        const TimelineOptions& options) {
  v1::RunPlan drawn;
  *drawn.mutable_spec() = plan.spec();
  *drawn.mutable_schedule() = plan.schedule();
  drawn.set_schedule_hash(plan.schedule_hash());
  v1::TrainSpec& train = *drawn.mutable_spec()->mutable_train();
  train.set_gradient_accumulation(std::min(train.gradient_accumulation(), kMostMicroSteps));
  const v1::ParallelSpec& parallel = plan.spec().parallel();
  UPIPE_ASSIGN_OR_RETURN(const auto dry,
                         kernels::CreateDryDevice(parallel.backend(), options.attention_kernel,
                                                  train::ScratchTableOf(plan)));
  const auto streams = engine::RankStreams::Create(*dry, rank);
  comm::DryCommunicator comm(rank, parallel.ranks(),
                             {.compute = streams.compute.get(),
                              .ranks_per_node = parallel.ranks_per_node(),
                              .reduce_room = comm::ReduceRoomOf(parallel.backend())});
  TimelineRecorder recorder(*dry, comm, options.price);
  WatchedDevice device(*dry, [&recorder] { recorder.BeforeOp(); });
  const engine::RankContext context({.device = device,
                                     .streams = streams,
                                     .comm = comm,
                                     .observer = &recorder,
                                     .storage = model::StorageTypeOf(plan.spec().train()),
                                     .mesh = parallel::Mesh::From(plan.spec().parallel())});
  UPIPE_RETURN_IF_ERROR(RunStep(context, drawn));
  recorder.End();
  UPIPE_ASSIGN_OR_RETURN(Timeline timeline, std::move(recorder).Take());
  timeline.rank = rank;
  return timeline;
}

double Extent(const Timeline& timeline, const TimelineMoment& moment) {
  return timeline.timed ? moment.seconds.elapsed : moment.flops;
}

size_t FullestOnDevice(const std::vector<TimelineMoment>& moments) {
  return Fullest(moments, [](const TimelineMoment& moment) { return moment.device.total_bytes; });
}

size_t FullestOnHost(const std::vector<TimelineMoment>& moments) {
  return Fullest(moments, [](const TimelineMoment& moment) { return moment.host.total_bytes; });
}

void Absorb(TimelineMoment& moment, const TimelineMoment& next) {
  if (next.device.total_bytes > moment.device.total_bytes) {
    moment.at = next.at;
    moment.device = next.device;
  }
  if (next.host.total_bytes > moment.host.total_bytes) moment.host = next.host;
  moment.ops += next.ops;
  moment.flops += next.flops;
  moment.bytes_sent += next.bytes_sent;
  moment.bytes_to_host += next.bytes_to_host;
  moment.bytes_from_host += next.bytes_from_host;
  moment.seconds.elapsed += next.seconds.elapsed;
  moment.seconds.compute += next.seconds.compute;
  moment.seconds.exchange += next.seconds.exchange;
  moment.seconds.copies += next.seconds.copies;
}

std::vector<TimelineMoment> Thin(const std::vector<TimelineMoment>& moments, size_t most) {
  UPIPE_CHECK(most > 0) << "no moments to thin to";
  const size_t stride = CeilDiv(moments.size(), most);
  std::vector<TimelineMoment> thin;
  size_t merged = 0;
  for (const TimelineMoment& moment : moments) {
    if (merged > 0 && merged < stride && thin.back().at.pass == moment.at.pass) {
      Absorb(thin.back(), moment);
      ++merged;
    } else {
      thin.push_back(moment);
      merged = 1;
    }
  }
  return thin;
}

}  // namespace upipe::planner
