// One optimizer update: the written gradient rule, global-norm clipping and AdamW on the rank's
// shard.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "engine/model/position_ranges.h"
#include "engine/model/sharded_parameters.h"
#include "upipe/v1/job.pb.h"

namespace upipe::optim {

// Learning rate of a step (1-based): linear from peak / warmup to peak over the warm-up, then half
// a cosine down to the minimum, reached at `total_steps`.
double LearningRate(const v1::OptimizerSpec& spec, int64_t step, int64_t total_steps);

// What a step's ranks agree on; one small device block, read by the host once per step. The first
// block of fp64 is all-reduced at once.
struct StepScalars {
  // Summed token losses and tokens with a label, by range of positions.
  struct LossAndCount {
    double loss = 0;
    double count = 0;
  };
  using ByPosition = std::array<LossAndCount, model::kNumPositionRanges>;
  ByPosition by_position;
  double sum_of_squares = 0;  // of the summed gradients
  float grad_norm = 0;        // of the mean gradient, before clipping
  float scale = 0;            // applied to the summed gradient
  int32_t skip = 0;           // 1: no valid token or a non-finite norm; nothing was updated
  int32_t padding = 0;
};

// The sum over all ranges, in ascending order.
StepScalars::LossAndCount TotalOf(const StepScalars::ByPosition& by_position);

// Views of StepScalars in device memory.
class StepScalarsView {
 public:
  explicit StepScalarsView(void* device) : device_(static_cast<char*>(device)) {}
  kernels::TensorView LossAndCount() const {
    return kernels::TensorView::Matrix(device_ + offsetof(StepScalars, by_position),
                                       kernels::DType::kFloat64, model::kNumPositionRanges, 2);
  }
  kernels::TensorView SumOfSquares() const {
    return View(offsetof(StepScalars, sum_of_squares), kernels::DType::kFloat64, 1);
  }
  kernels::TensorView GradNorm() const {
    return View(offsetof(StepScalars, grad_norm), kernels::DType::kFloat32, 1);
  }
  kernels::TensorView Scale() const {
    return View(offsetof(StepScalars, scale), kernels::DType::kFloat32, 1);
  }
  kernels::TensorView Skip() const {
    return View(offsetof(StepScalars, skip), kernels::DType::kInt32, 1);
  }
  // Everything that is summed over ranks, [kNumReduced] fp64.
  double* Reduced() const { return reinterpret_cast<double*>(device_); }
  static constexpr int64_t kNumReduced = 2 * model::kNumPositionRanges + 1;

 private:
  kernels::TensorView View(size_t offset, kernels::DType dtype, int64_t n) const {
    return kernels::TensorView::Vector(device_ + offset, dtype, n);
  }
  char* device_;
};

// Sums squares of the gradient shard, reduces loss, count and squares over ranks in rank order,
// clips, updates. Enqueued on the compute stream. `applied_step` is 1-based and drives the bias
// correction.
absl::Status UpdateParameters(const engine::RankContext& context,
                              model::ShardedParameters& parameters, const v1::OptimizerSpec& spec,
                              double learning_rate, int64_t applied_step, StepScalarsView scalars);

}  // namespace upipe::optim
