#include "tools/report/step_profile.h"

#include <memory>

#include "common/check.h"
#include "common/status.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/rank_context.h"
#include "engine/train/step.h"
#include "kernels/device_factory.h"

namespace upipe::report {
namespace {

class ProfilingOpTable final : public kernels::OpTable {
 public:
  ProfilingOpTable(kernels::OpTable& ops, kernels::Allocator& allocator)
      : ops_(ops), allocator_(allocator) {}

  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    return ops_.WorkspaceBytes(params);
  }

  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace workspace,
                       kernels::Stream& stream) override {
    Note();
    return ops_.Enqueue(params, workspace, stream);
  }

  // Takes the fullest instant since the last call and starts anew.
  void Note() {
    const kernels::MemoryStats stats = allocator_.stats();
    moments_.push_back({stats.peak_moment, stats.at_peak_bytes, stats.peak_total_bytes});
    allocator_.ResetPeaks();
  }
  void Clear() {
    moments_.clear();
    allocator_.ResetPeaks();
  }
  const std::vector<ProfileMoment>& moments() const { return moments_; }

 private:
  kernels::OpTable& ops_;
  kernels::Allocator& allocator_;
  std::vector<ProfileMoment> moments_;
};

// The dry device with the profiling op table in front.
class ProfilingDevice final : public kernels::Device {
 public:
  explicit ProfilingDevice(kernels::DryDevice& device)
      : device_(device), ops_(device.ops(), device.allocator()) {}

  std::string name() const override { return device_.name(); }
  kernels::Allocator& allocator() override { return device_.allocator(); }
  ProfilingOpTable& ops() override { return ops_; }
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
  ProfilingOpTable ops_;
};

// "backward layer 1" of "backward layer 1 stage 0".
std::string PassAndLayer(const std::string& moment) {
  return moment.substr(0, moment.find(" stage"));
}

}  // namespace

absl::StatusOr<std::vector<ProfileMoment>> ProfileStep(const v1::RunPlan& plan, int rank) {
  UPIPE_ASSIGN_OR_RETURN(const auto dry,
                         kernels::CreateDryDevice(plan.spec().parallel().backend()));
  ProfilingDevice device(*dry);
  comm::DryCommunicator comm(rank, plan.spec().parallel().ranks());
  const auto streams = engine::RankStreams::Create(device, rank);
  const engine::RankContext context({.device = device,
                                     .streams = streams,
                                     .comm = comm,
                                     .storage = model::StorageTypeOf(plan.spec().train()),
                                     .mesh = parallel::Mesh::From(plan.spec().parallel())});
  UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
  device.ops().Clear();
  const std::vector<train::HostTokens> sequences(plan.spec().train().gradient_accumulation());
  UPIPE_RETURN_IF_ERROR(step->Run(1, sequences).status());
  device.ops().Note();
  return device.ops().moments();
}

std::vector<ProfileMoment> Thin(const std::vector<ProfileMoment>& profile, size_t columns) {
  UPIPE_CHECK(columns > 0) << "no columns to thin to";
  const size_t stride = (profile.size() + columns - 1) / columns;
  std::vector<ProfileMoment> thin;
  size_t merged = 0;
  for (const ProfileMoment& moment : profile) {
    const bool joins = merged > 0 && merged < stride &&
                       PassAndLayer(thin.back().moment) == PassAndLayer(moment.moment);
    if (!joins) {
      thin.push_back(moment);
      merged = 1;
      continue;
    }
    ++merged;
    if (moment.total_bytes > thin.back().total_bytes) thin.back() = moment;
  }
  return thin;
}

}  // namespace upipe::report
