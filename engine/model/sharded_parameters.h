// The rank's shard of every parameter, gradient and AdamW moment (ZeRO-3 over all ranks), all fp32,
// and the gathering and reducing of one unit at a time. A unit's weights are gathered in the
// storage type, on a stream of their own, so that the next unit's can travel while this one's are
// used.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/parameters.h"
#include "engine/rank_context.h"

namespace upipe::model {

// A unit's full weights (storage type) or full gradients (fp32), [unit.num_elements].
struct GatheredUnit {
  kernels::Buffer buffer;  // empty where the shard is the whole unit
  void* data = nullptr;
  kernels::DType dtype = kernels::DType::kFloat32;
  const ParameterUnit* unit = nullptr;
  kernels::TensorView Tensor(const std::string& name_suffix) const;  // [rows, cols] or [n]
};

class ShardedParameters {
 public:
  // Allocates and initialises: matrices normal(seed, tensor, index), norm weights one, the same
  // values for every number of ranks. Moments zero.
  static absl::StatusOr<ShardedParameters> Create(const engine::RankContext& context,
                                                  const ParameterLayout& layout, uint64_t seed);

  // Begins to gather a unit's weights (tag weights) as soon as the compute stream gets here; the
  // next Gather must be of this unit. Every rank calls it in the same order.
  absl::Status Prefetch(const ParameterUnit& unit);
  // A unit's weights, prefetched or gathered now; the compute stream waits for them.
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
  // One rank's fp32 shard is the unit: nothing is gathered.
  bool ShardIsUnit() const;
  bool WasReduced(const ParameterUnit& unit) const;

  const engine::RankContext* context_;
  const ParameterLayout* layout_;
  std::vector<Piece> pieces_;
  std::vector<const ParameterUnit*> reduced_;  // units reduced since BeginGradients
  kernels::Buffer weights_, gradients_, first_moments_, second_moments_;
  GatheredUnit prefetched_;
  std::unique_ptr<kernels::Stream> gather_stream_;  // drained before what it writes goes
};

}  // namespace upipe::model
