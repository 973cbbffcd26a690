// The rank's shard of every parameter, gradient and AdamW moment (ZeRO-3 over all ranks), and the
// gathering and reducing of one unit at a time. fp32 master weights are the weights.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "engine/model/parameters.h"
#include "engine/rank_context.h"

namespace upipe::model {

// A unit's full weights or full gradients, [unit.num_elements].
struct GatheredUnit {
  kernels::Buffer buffer;
  const ParameterUnit* unit = nullptr;
  kernels::TensorView Tensor(const std::string& name_suffix) const;  // [rows, cols] or [n]
};

class ShardedParameters {
 public:
  // Allocates and initialises: matrices normal(seed, tensor, index), norm weights one, the same
  // values for every number of ranks. Moments zero.
  static absl::StatusOr<ShardedParameters> Create(const engine::RankContext& context,
                                                  const ParameterLayout& layout, uint64_t seed);

  // All-gathers a unit's weights (tag weights). Every rank calls it in the same order.
  absl::StatusOr<GatheredUnit> Gather(const ParameterUnit& unit);
  // A zeroed gradient of a whole unit (tag gradients).
  absl::StatusOr<GatheredUnit> ZeroGradient(const ParameterUnit& unit);
  // Starts a step's gradients: the first reduction of each unit writes its shard, later ones add.
  void BeginGradients();
  // Sums a unit's gradient over ranks into this rank's shard.
  absl::Status ReduceGradient(GatheredUnit gradient);

  const ParameterLayout& layout() const { return *layout_; }
  kernels::TensorView weights() const { return Shard(weights_); }  // [layout.shard_elements]
  kernels::TensorView gradients() const { return Shard(gradients_); }
  kernels::TensorView first_moments() const { return Shard(first_moments_); }
  kernels::TensorView second_moments() const { return Shard(second_moments_); }

  // The pieces of tensors this rank's shard holds, in shard order.
  struct Piece {
    const ParameterTensor* tensor = nullptr;
    int64_t shard_begin = 0;   // elements into the shard of all units
    int64_t tensor_begin = 0;  // elements into the tensor
    int64_t count = 0;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  ShardedParameters(const engine::RankContext& context, const ParameterLayout& layout);
  kernels::TensorView Shard(const kernels::Buffer& buffer) const;
  kernels::TensorView UnitShard(const kernels::Buffer& buffer, const ParameterUnit& unit) const;

  const engine::RankContext* context_;
  const ParameterLayout* layout_;
  std::vector<Piece> pieces_;
  std::vector<const ParameterUnit*> reduced_;  // units reduced since BeginGradients
  kernels::Buffer weights_, gradients_, first_moments_, second_moments_;
};

}  // namespace upipe::model
