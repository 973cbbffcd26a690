// One optimizer update: the written gradient rule, global-norm clipping and AdamW on the rank's
// shard.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "engine/model/sharded_parameters.h"
#include "upipe/v1/job.pb.h"

namespace upipe::optim {

// Learning rate of a step (1-based): linear from peak / warmup to peak over the warm-up, then half
// a cosine down to the minimum, reached at `total_steps`.
double LearningRate(const v1::OptimizerSpec& spec, int64_t step, int64_t total_steps);

// What a step's ranks agree on; one small device block, read by the host once per step. The first
// three are all-reduced together.
struct StepScalars {
  double loss = 0;            // summed token losses
  double count = 0;           // tokens with a label
  double sum_of_squares = 0;  // of the summed gradients
  float grad_norm = 0;        // of the mean gradient, before clipping
  float scale = 0;            // applied to the summed gradient
  int32_t skip = 0;           // 1: no valid token or a non-finite norm; nothing was updated
  int32_t padding = 0;
};

// Views of StepScalars in device memory.
class StepScalarsView {
 public:
  explicit StepScalarsView(void* device) : device_(static_cast<char*>(device)) {}
  kernels::TensorView LossAndCount() const {
    return View(offsetof(StepScalars, loss), kernels::DType::kFloat64, 2);
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
  double* Reduced() const { return reinterpret_cast<double*>(device_); }  // [3] fp64

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
