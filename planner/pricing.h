// What there is (a device, its memory, its node's) and what points of the search take of it. Prices
// are composed dry runs of the job's own step (compose.h), timed by the device description.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "planner/plan.h"
#include "planner/search.h"
#include "upipe/v1/device.pb.h"

namespace upipe::planner {

// By what factor an estimate of device memory may be too high.
inline constexpr double kEstimateSlack = 1.25;

class Pricing {
 public:
  // `spec` may leave things auto. NotFound or InvalidArgument about the device description.
  static absl::StatusOr<Pricing> For(const v1::JobSpec& spec, const PlanLimits& limits);

  const v1::DeviceFile& device() const { return device_; }
  // Whose scratch is counted: the device's, or what stands in for it in a deterministic job.
  const std::string& attention_kernel() const { return attention_kernel_; }
  int ranks_per_node() const { return ranks_per_node_; }
  // Device and host memory are one RAM: backends cpu and reference.
  bool one_ram() const { return one_ram_; }
  const v1::MemoryBudget& budget() const { return budget_; }
  Room room() const;
  int num_threads() const { return num_threads_; }

  // The plan of a spec without anything auto: composed dry runs of all ranks and their time; no
  // budget, no hash, nothing compared with what there is. Thread safe.
  absl::StatusOr<v1::RunPlan> Plan(const v1::JobSpec& spec) const;
  // Of that plan.
  absl::StatusOr<Price> Of(const v1::JobSpec& spec) const;
  // The same for a search: where a rank has many tokens, from steps over two short contexts (see
  // estimate in pricing.cc), of one rank of each list of heads. Time and host bytes to a fraction
  // of a percent, device bytes to a few percent where the context is long. Thread safe.
  absl::StatusOr<Price> Estimate(const v1::JobSpec& spec) const;
  // Of; borrows this.
  Pricer exact_pricer() const {
    return [this](const v1::JobSpec& spec) { return Of(spec); };
  }
  // Estimate; borrows this.
  Pricer pricer() const {
    return [this](const v1::JobSpec& spec) { return Estimate(spec); };
  }

  // Price of a plan whose ranks are filled in; seconds of its step_time.
  Price Of(const v1::RunPlan& plan) const;
  // The step of the slowest of `ranks`. `shape` needs spec, schedule and model_flops.
  absl::StatusOr<v1::StepTime> Time(const v1::RunPlan& shape,
                                    const std::vector<StepCounts>& ranks) const;

 private:
  // Without ranks, on this many to a node.
  absl::StatusOr<v1::RunPlan> Shape(const v1::JobSpec& spec) const;

  v1::DeviceFile device_;
  std::string attention_kernel_;
  v1::MeasuredWorkspaces measured_;
  int num_threads_ = 1;
  int ranks_per_node_ = 1;
  bool one_ram_ = true;
  v1::MemoryBudget budget_;
};

}  // namespace upipe::planner
