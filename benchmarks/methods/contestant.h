// One method at work: its plan, its ranks as threads over the inproc communicator, and what its
// steps have cost so far.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/methods/method_case.h"
#include "benchmarks/support/rank_gang.h"
#include "nlohmann/json.hpp"
#include "upipe/v1/plan.pb.h"

namespace upipe::bench {

class Contestant {
 public:
  // Plans, makes the ranks and runs a first step, which touches pages and is not kept.
  static absl::StatusOr<std::unique_ptr<Contestant>> Create(const MethodCase& method,
                                                            const MethodJob& job);

  // The next step, kept.
  absl::Status Step();

  const MethodCase& method() const { return method_; }
  const v1::RunPlan& plan() const { return plan_; }
  double first_loss() const { return first_loss_; }
  const std::vector<GangStep>& steps() const { return steps_; }
  std::vector<double> cpu_seconds() const;
  std::vector<double> wall_seconds() const;

  // Internal when a rank's memory, of device or host, was not the plan's to the byte.
  absl::Status CheckMemory() const;
  // A row of the report. Memory is that of the rank with the highest peak; work, bytes on their
  // way and seconds of processors are those of all ranks.
  absl::StatusOr<nlohmann::ordered_json> Row() const;

 private:
  Contestant(const MethodCase& method, v1::RunPlan plan);
  nlohmann::ordered_json OpRows() const;

  const MethodCase& method_;
  const v1::RunPlan plan_;
  std::unique_ptr<RankGang> gang_;
  double first_loss_ = 0;
  std::vector<GangStep> steps_;
};

// Internal when first losses differ by more than one rounding (2^-9) in bf16, or 1e-3 in fp32,
// relative.
absl::Status CheckLosses(const std::vector<std::unique_ptr<Contestant>>& contestants, bool bf16);

}  // namespace upipe::bench
