// The rank's shard of every parameter, gradient and AdamW moment (ZeRO-3 over fsdp x ring x
// ulysses, replicated over dp), all fp32, on the device or in host memory, and the gathering and
// reducing of one unit at a time. A unit's weights are gathered in the storage type, on a stream of
// their own, so that the next unit's can travel while this one's are used. On the host nothing of a
// shard stays on the device: weights come with each gathering, and a unit's reduced gradient leaves
// while the next unit's is made.
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
  ~ShardedParameters();
  // Allocates and initialises: matrices normal(seed, tensor, index), norm weights one, the same
  // values for every number of ranks. Moments zero. `layout` is of the context's mesh.
  static absl::StatusOr<std::unique_ptr<ShardedParameters>> Create(
      const engine::RankContext& context, const ParameterLayout& layout, uint64_t seed,
      engine::Place place);

  // Begins to gather a unit's weights (tag weights) as soon as the compute stream gets here; the
  // next Gather must be of this unit. Every rank calls it in the same order.
  absl::Status Prefetch(const ParameterUnit& unit);
  // A unit's weights, prefetched or gathered now; the compute stream waits for them.
  absl::StatusOr<GatheredUnit> Gather(const ParameterUnit& unit);
  // The gradient of a whole unit to add to (tag gradients): zero, but for what the only rank that
  // shares a unit has of it already.
  absl::StatusOr<GatheredUnit> BeginGradient(const ParameterUnit& unit);
  // Starts a step's gradients: the first reduction of each unit writes its shard, later ones add.
  void BeginGradients();
  // Sums a unit's gradient over the ranks that share it into this rank's shard.
  absl::Status ReduceGradient(GatheredUnit gradient);
  // Frees the device memory of the gradient that left last; the compute stream waits until it has.
  void AwaitLeft();
  // Ends a step's gradients: sums the shards over replicas, the same bits on each. Later work of
  // the compute stream finds the gradients where they live.
  absl::Status ReduceOverReplicas();

  const ParameterLayout& layout() const { return *layout_; }
  engine::Place place() const { return place_; }
  // Of this rank, [layout.shard_elements], where place() says.
  kernels::TensorView weights() const { return Shard(weights_); }
  kernels::TensorView gradients() const { return Shard(gradients_); }
  kernels::TensorView first_moments() const { return Shard(first_moments_); }
  kernels::TensorView second_moments() const { return Shard(second_moments_); }
  // Enqueues an op over shards where they live: on the compute stream, or on the host stream.
  absl::Status RunOnShards(const kernels::OpParams& params) const;

  // The pieces of tensors this rank's shard holds, in shard order.
  struct Piece {
    const ParameterTensor* tensor = nullptr;
    int64_t shard_begin = 0;   // elements into the shard of all units
    int64_t tensor_begin = 0;  // elements into the tensor
    int64_t count = 0;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  ShardedParameters(const engine::RankContext& context, const ParameterLayout& layout,
                    engine::Place place);
  absl::Status Initialise(uint64_t seed);
  absl::StatusOr<kernels::Buffer> AllocateShard(kernels::MemoryTag tag) const;
  kernels::TensorView Shard(const kernels::Buffer& buffer) const;
  kernels::TensorView UnitShard(const kernels::Buffer& buffer, const ParameterUnit& unit) const;
  bool OnHost() const { return place_ == engine::Place::kHost; }
  bool SharesUnits() const { return group_.size() > 1; }
  // One rank's fp32 shard on the device is the unit: nothing is gathered.
  bool ShardIsUnit() const;
  bool WasReduced(const ParameterUnit& unit) const;
  // Puts this rank's part of a unit, in the storage type, where `own` is: from the device's shard
  // on the compute stream, from the host's on the gather stream.
  absl::Status StoreOwnShard(const ParameterUnit& unit, const kernels::TensorView& own);
  // A unit's gradient shard on the device: itself, or memory for it (with `fetched`, filled).
  struct ShardOnDevice {
    kernels::Buffer buffer;
    kernels::TensorView view;
  };
  absl::StatusOr<ShardOnDevice> GradientShard(const ParameterUnit& unit, bool fetched);
  // Copies what lives on the host between there and the device: the compute stream waits for what
  // comes; what leaves is kept until it has.
  void Fetch(const kernels::TensorView& host, void* device);
  void Leave(kernels::Buffer buffer, const kernels::TensorView& host);
  absl::Status SumOverReplicas(const kernels::TensorView& shard);

  const engine::RankContext* context_;
  const engine::RankContext gathering_;  // on the stream that gathers
  const ParameterLayout* layout_;
  engine::Place place_;
  comm::RankGroup group_;  // that shares the units
  int index_;              // in the group
  comm::RankGroup replicas_;
  std::vector<Piece> pieces_;
  std::vector<const ParameterUnit*> reduced_;  // units reduced since BeginGradients
  kernels::Buffer weights_, gradients_, first_moments_, second_moments_;
  GatheredUnit prefetched_;
  kernels::Buffer leaving_;  // a gradient on its way to the host
  kernels::Event left_;
};

}  // namespace upipe::model
