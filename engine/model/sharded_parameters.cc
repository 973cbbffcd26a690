#include "engine/model/sharded_parameters.h"

#include <algorithm>

#include "common/check.h"
#include "common/status.h"

namespace upipe::model {

using kernels::Buffer;
using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

TensorView GatheredUnit::Tensor(const std::string& name_suffix) const {
  const ParameterTensor& tensor = unit->Find(name_suffix);
  float* data = static_cast<float*>(buffer.data()) + tensor.offset;
  if (tensor.shape.size() == 1) return TensorView::Vector(data, DType::kFloat32, tensor.shape[0]);
  return TensorView::Matrix(data, DType::kFloat32, tensor.shape[0], tensor.shape[1]);
}

ShardedParameters::ShardedParameters(const engine::RankContext& context,
                                     const ParameterLayout& layout)
    : context_(&context), layout_(&layout) {
  for (const ParameterUnit* unit : layout.Units()) {
    const int64_t begin = context.rank() * unit->shard_elements;
    const int64_t end = begin + unit->shard_elements;
    for (const ParameterTensor& tensor : unit->tensors) {
      const int64_t from = std::max(begin, tensor.offset);
      const int64_t to = std::min(end, tensor.offset + tensor.num_elements);
      if (from >= to) continue;
      pieces_.push_back(
          {&tensor, unit->shard_offset + from - begin, from - tensor.offset, to - from});
    }
  }
}

absl::StatusOr<ShardedParameters> ShardedParameters::Create(const engine::RankContext& context,
                                                            const ParameterLayout& layout,
                                                            uint64_t seed) {
  ShardedParameters parameters(context, layout);
  const int64_t count = layout.shard_elements;
  UPIPE_ASSIGN_OR_RETURN(parameters.weights_, context.AllocateFloats(MemoryTag::kWeights, count));
  UPIPE_ASSIGN_OR_RETURN(parameters.gradients_,
                         context.AllocateFloats(MemoryTag::kGradients, count));
  UPIPE_ASSIGN_OR_RETURN(parameters.first_moments_,
                         context.AllocateFloats(MemoryTag::kOptimizer, count));
  UPIPE_ASSIGN_OR_RETURN(parameters.second_moments_,
                         context.AllocateFloats(MemoryTag::kOptimizer, count));
  for (const TensorView& shard : {parameters.weights(), parameters.gradients(),
                                  parameters.first_moments(), parameters.second_moments()}) {
    UPIPE_RETURN_IF_ERROR(context.Fill(shard, 0));
  }
  for (const Piece& piece : parameters.pieces_) {
    const TensorView slice = parameters.weights().Rows(piece.shard_begin, piece.count);
    if (piece.tensor->init_stddev == 0) {
      UPIPE_RETURN_IF_ERROR(context.Fill(slice, 1));
      continue;
    }
    UPIPE_RETURN_IF_ERROR(context.Run(
        kernels::RandomNormalParams{.dst = slice,
                                    .seed = seed,
                                    .tensor_id = TensorId(piece.tensor->name),
                                    .first_index = piece.tensor_begin,
                                    .stddev = static_cast<float>(piece.tensor->init_stddev)}));
  }
  return parameters;
}

TensorView ShardedParameters::Shard(const Buffer& buffer) const {
  return TensorView::Vector(buffer.data(), DType::kFloat32, layout_->shard_elements);
}

TensorView ShardedParameters::UnitShard(const Buffer& buffer, const ParameterUnit& unit) const {
  return Shard(buffer).Rows(unit.shard_offset, unit.shard_elements);
}

absl::StatusOr<GatheredUnit> ShardedParameters::Gather(const ParameterUnit& unit) {
  GatheredUnit gathered{.buffer = {}, .unit = &unit};
  UPIPE_ASSIGN_OR_RETURN(gathered.buffer,
                         context_->AllocateFloats(MemoryTag::kWeights, unit.num_elements));
  const TensorView shard = UnitShard(weights_, unit);
  UPIPE_RETURN_IF_ERROR(context_->comm().AllGather(shard.data, gathered.buffer.data(),
                                                   shard.num_bytes(), context_->stream()));
  return gathered;
}

absl::StatusOr<GatheredUnit> ShardedParameters::ZeroGradient(const ParameterUnit& unit) {
  GatheredUnit gradient{.buffer = {}, .unit = &unit};
  UPIPE_ASSIGN_OR_RETURN(gradient.buffer,
                         context_->AllocateFloats(MemoryTag::kGradients, unit.num_elements));
  UPIPE_RETURN_IF_ERROR(context_->Fill(
      TensorView::Vector(gradient.buffer.data(), DType::kFloat32, unit.num_elements), 0));
  return gradient;
}

void ShardedParameters::BeginGradients() { reduced_.clear(); }

absl::Status ShardedParameters::ReduceGradient(GatheredUnit gradient) {
  const ParameterUnit& unit = *gradient.unit;
  const bool again = std::find(reduced_.begin(), reduced_.end(), &unit) != reduced_.end();
  reduced_.push_back(&unit);
  const TensorView home = UnitShard(gradients_, unit);
  TensorView destination = home;
  Buffer sum;
  if (again) {
    UPIPE_ASSIGN_OR_RETURN(sum,
                           context_->AllocateFloats(MemoryTag::kGradients, unit.shard_elements));
    destination.data = sum.data();
  }
  UPIPE_ASSIGN_OR_RETURN(
      Buffer scratch,
      context_->Allocate(MemoryTag::kComm,
                         context_->comm().ReduceScatterScratchBytes(unit.shard_elements)));
  UPIPE_RETURN_IF_ERROR(context_->comm().ReduceScatter(
      static_cast<const float*>(gradient.buffer.data()), destination.as<float>(),
      unit.shard_elements, scratch.data(), context_->stream()));
  if (!again) return absl::OkStatus();
  return context_->Run(kernels::StridedCopyParams{
      .src = destination.AsTensor3(), .dst = home.AsTensor3(), .accumulate = true});
}

}  // namespace upipe::model
