#include "engine/model/sharded_parameters.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::model {

using kernels::Buffer;
using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

TensorView GatheredUnit::Tensor(const std::string& name_suffix) const {
  const ParameterTensor& tensor = unit->Find(name_suffix);
  void* first = static_cast<char*>(data) + tensor.offset * SizeOf(dtype);
  if (tensor.shape.size() == 1) return TensorView::Vector(first, dtype, tensor.shape[0]);
  return TensorView::Matrix(first, dtype, tensor.shape[0], tensor.shape[1]);
}

ShardedParameters::ShardedParameters(const engine::RankContext& context,
                                     const ParameterLayout& layout)
    : context_(&context),
      layout_(&layout),
      gather_stream_(context.device().CreateStream(absl::StrCat("gather", context.rank()))) {
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
      UPIPE_RETURN_IF_ERROR(context.Fill(slice, piece.tensor->init_value));
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

bool ShardedParameters::ShardIsUnit() const {
  return context_->num_ranks() == 1 && context_->storage() == DType::kFloat32;
}

absl::Status ShardedParameters::Prefetch(const ParameterUnit& unit) {
  UPIPE_CHECK(prefetched_.unit == nullptr)
      << "unit " << prefetched_.unit->name << " was prefetched and not yet used";
  const DType dtype = context_->storage();
  const TensorView shard = UnitShard(weights_, unit);
  prefetched_ = {.buffer = {}, .data = shard.data, .dtype = dtype, .unit = &unit};
  if (ShardIsUnit()) return absl::OkStatus();
  UPIPE_ASSIGN_OR_RETURN(prefetched_.buffer,
                         context_->AllocateStored(MemoryTag::kWeights, unit.num_elements));
  prefetched_.data = prefetched_.buffer.data();
  const int64_t bytes = unit.shard_elements * SizeOf(dtype);
  void* send = shard.data;
  if (dtype != DType::kFloat32) {
    send = static_cast<char*>(prefetched_.data) + context_->rank() * bytes;
    const TensorView own = TensorView::Vector(send, dtype, unit.shard_elements);
    // On the compute stream: two streams that compute at once would share the rank's threads.
    UPIPE_RETURN_IF_ERROR(context_->Run(
        kernels::StridedCopyParams{.src = shard.AsTensor3(), .dst = own.AsTensor3()}));
  }
  // The block may have been another's, and the weights may be in the optimizer's hands, until the
  // compute stream gets here.
  gather_stream_->Wait(context_->stream().Record());
  return context_->comm().AllGather(send, prefetched_.data, bytes, *gather_stream_);
}

absl::StatusOr<GatheredUnit> ShardedParameters::Gather(const ParameterUnit& unit) {
  if (prefetched_.unit == nullptr) UPIPE_RETURN_IF_ERROR(Prefetch(unit));
  UPIPE_CHECK(prefetched_.unit == &unit)
      << "unit " << prefetched_.unit->name << " was prefetched, " << unit.name << " is asked for";
  context_->stream().Wait(gather_stream_->Record());
  return std::exchange(prefetched_, {});
}

absl::StatusOr<GatheredUnit> ShardedParameters::ZeroGradient(const ParameterUnit& unit) {
  const TensorView shard = UnitShard(gradients_, unit);
  GatheredUnit gradient{.buffer = {}, .data = shard.data, .unit = &unit};
  if (context_->num_ranks() > 1) {
    UPIPE_ASSIGN_OR_RETURN(gradient.buffer,
                           context_->AllocateFloats(MemoryTag::kGradients, unit.num_elements));
    gradient.data = gradient.buffer.data();
  } else if (WasReduced(unit)) {
    return gradient;  // its second part is added where the first lies
  }
  UPIPE_RETURN_IF_ERROR(
      context_->Fill(TensorView::Vector(gradient.data, DType::kFloat32, unit.num_elements), 0));
  return gradient;
}

void ShardedParameters::BeginGradients() { reduced_.clear(); }

bool ShardedParameters::WasReduced(const ParameterUnit& unit) const {
  return std::find(reduced_.begin(), reduced_.end(), &unit) != reduced_.end();
}

absl::Status ShardedParameters::ReduceGradient(GatheredUnit gradient) {
  const ParameterUnit& unit = *gradient.unit;
  const bool again = WasReduced(unit);
  reduced_.push_back(&unit);
  if (context_->num_ranks() == 1) return absl::OkStatus();
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
  UPIPE_RETURN_IF_ERROR(context_->comm().ReduceScatter(static_cast<const float*>(gradient.data),
                                                       destination.as<float>(), unit.shard_elements,
                                                       scratch.data(), context_->stream()));
  if (!again) return absl::OkStatus();
  return context_->Run(kernels::StridedCopyParams{
      .src = destination.AsTensor3(), .dst = home.AsTensor3(), .accumulate = true});
}

}  // namespace upipe::model
