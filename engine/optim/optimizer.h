// One optimizer update: the written gradient rule, global-norm clipping and AdamW on the rank's
// shard, on the device or, where the shard lives in host memory, by host ops: the same bits.
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

// Views of StepScalars in memory that ops reach.
class StepScalarsView {
 public:
  explicit StepScalarsView(void* data) : data_(static_cast<char*>(data)) {}
  kernels::TensorView LossAndCount() const {
    return kernels::TensorView::Matrix(data_ + offsetof(StepScalars, by_position),
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
  void* data() const { return data_; }
  // Everything that is summed over ranks, [kNumReduced] fp64.
  double* Reduced() const { return reinterpret_cast<double*>(data_); }
  static constexpr int64_t kNumReduced = 2 * model::kNumPositionRanges + 1;

 private:
  kernels::TensorView View(size_t offset, kernels::DType dtype, int64_t n) const {
    return kernels::TensorView::Vector(data_ + offset, dtype, n);
  }
  char* data_;
};

// Sums squares of the gradient shard, reduces loss, count and squares over all ranks in rank order,
// clips, updates. Every rank counts its own tokens; a shard that replicas share is counted by the
// first of them, the others add an exact 0. Enqueued; later work of the compute stream comes after
// it. `applied_step` is 1-based and drives the bias correction.
absl::Status UpdateParameters(const engine::RankContext& context,
                              model::ShardedParameters& parameters, const v1::OptimizerSpec& spec,
                              double learning_rate, int64_t applied_step, StepScalarsView scalars);

}  // namespace upipe::optim
