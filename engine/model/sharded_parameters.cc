#include "engine/model/sharded_parameters.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::model {

using engine::Place;
using engine::StageName;
using engine::Timed;
using engine::Waiting;
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
                                     const ParameterLayout& layout, Place place)
    : context_(&context),
      gathering_(context.On(*context.streams().gather)),
      layout_(&layout),
      place_(place),
      group_(context.mesh().ShardGroup(context.rank())),
      index_(context.rank() % context.mesh().shard_ranks()),
      replicas_(context.mesh().DpGroup(context.rank())) {
  for (const ParameterUnit* unit : layout.Units()) {
    const int64_t begin = index_ * unit->shard_elements;
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

// What gathers weights is drained before they go.
ShardedParameters::~ShardedParameters() { gathering_.stream().Synchronize().IgnoreError(); }

absl::StatusOr<std::unique_ptr<ShardedParameters>> ShardedParameters::Create(
    const engine::RankContext& context, const ParameterLayout& layout, uint64_t seed, Place place) {
  std::unique_ptr<ShardedParameters> parameters(new ShardedParameters(context, layout, place));
  ShardedParameters& p = *parameters;
  UPIPE_ASSIGN_OR_RETURN(p.weights_, p.AllocateShard(MemoryTag::kWeights));
  UPIPE_ASSIGN_OR_RETURN(p.gradients_, p.AllocateShard(MemoryTag::kGradients));
  UPIPE_ASSIGN_OR_RETURN(p.first_moments_, p.AllocateShard(MemoryTag::kOptimizer));
  UPIPE_ASSIGN_OR_RETURN(p.second_moments_, p.AllocateShard(MemoryTag::kOptimizer));
  UPIPE_RETURN_IF_ERROR(p.Initialise(seed));
  if (p.OnHost()) context.stream().Wait(context.streams().host->Record());
  return parameters;
}

absl::Status ShardedParameters::Initialise(uint64_t seed) {
  for (const TensorView& shard : {weights(), gradients(), first_moments(), second_moments()}) {
    UPIPE_RETURN_IF_ERROR(RunOnShards(kernels::FillParams{.dst = shard, .value = 0}));
  }
  for (const Piece& piece : pieces_) {
    const TensorView slice = weights().Rows(piece.shard_begin, piece.count);
    if (piece.tensor->init_stddev == 0) {
      UPIPE_RETURN_IF_ERROR(
          RunOnShards(kernels::FillParams{.dst = slice, .value = piece.tensor->init_value}));
      continue;
    }
    UPIPE_RETURN_IF_ERROR(RunOnShards(
        kernels::RandomNormalParams{.dst = slice,
                                    .seed = seed,
                                    .tensor_id = TensorId(piece.tensor->name),
                                    .first_index = piece.tensor_begin,
                                    .stddev = static_cast<float>(piece.tensor->init_stddev)}));
  }
  return absl::OkStatus();
}

absl::StatusOr<Buffer> ShardedParameters::AllocateShard(MemoryTag tag) const {
  const int64_t count = layout_->shard_elements;
  if (!OnHost()) return context_->AllocateFloats(tag, count);
  return context_->device().host_allocator().Allocate(
      tag, count * static_cast<int64_t>(sizeof(float)), *context_->streams().host);
}

absl::Status ShardedParameters::RunOnShards(const kernels::OpParams& params) const {
  return OnHost() ? context_->RunOnHost(params) : context_->Run(params);
}

TensorView ShardedParameters::Shard(const Buffer& buffer) const {
  return TensorView::Vector(buffer.data(), DType::kFloat32, layout_->shard_elements);
}

TensorView ShardedParameters::UnitShard(const Buffer& buffer, const ParameterUnit& unit) const {
  return Shard(buffer).Rows(unit.shard_offset, unit.shard_elements);
}

bool ShardedParameters::ShardIsUnit() const {
  return !OnHost() && !SharesUnits() && context_->storage() == DType::kFloat32;
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
  if (OnHost() || dtype != DType::kFloat32) {
    send = static_cast<char*>(prefetched_.data) + index_ * bytes;
    UPIPE_RETURN_IF_ERROR(
        StoreOwnShard(unit, TensorView::Vector(send, dtype, unit.shard_elements)));
  }
  // The block may have been another's, and the weights may be in the optimizer's hands, until the
  // compute stream gets here.
  gathering_.stream().Wait(context_->stream().Record());
  const Timed timed(gathering_, StageName::kWeights);
  return context_->comm().AllGather(group_, send, prefetched_.data, bytes, gathering_.stream());
}

absl::Status ShardedParameters::StoreOwnShard(const ParameterUnit& unit, const TensorView& own) {
  const TensorView shard = UnitShard(weights_, unit);
  if (!OnHost()) {
    // On the compute stream: two streams that compute at once would share the rank's threads.
    const Timed timed(*context_, StageName::kWeights);
    return context_->Run(
        kernels::StridedCopyParams{.src = shard.AsTensor3(), .dst = own.AsTensor3()});
  }
  gathering_.stream().Wait(context_->stream().Record());
  const Timed timed(gathering_, StageName::kOffload);
  if (own.dtype == DType::kFloat32) {
    context_->device().CopyFromHost(own.data, shard.data, shard.num_bytes(), gathering_.stream());
    return absl::OkStatus();
  }
  UPIPE_ASSIGN_OR_RETURN(const Buffer wide,
                         gathering_.AllocateFloats(MemoryTag::kWeights, unit.shard_elements));
  const TensorView source = TensorView::Vector(wide.data(), DType::kFloat32, unit.shard_elements);
  context_->device().CopyFromHost(wide.data(), shard.data, shard.num_bytes(), gathering_.stream());
  return gathering_.Run(
      kernels::StridedCopyParams{.src = source.AsTensor3(), .dst = own.AsTensor3()});
}

absl::StatusOr<GatheredUnit> ShardedParameters::Gather(const ParameterUnit& unit) {
  if (prefetched_.unit == nullptr) UPIPE_RETURN_IF_ERROR(Prefetch(unit));
  UPIPE_CHECK(prefetched_.unit == &unit)
      << "unit " << prefetched_.unit->name << " was prefetched, " << unit.name << " is asked for";
  const Waiting waiting(*context_);
  context_->stream().Wait(gathering_.stream().Record());
  return std::exchange(prefetched_, {});
}

absl::StatusOr<GatheredUnit> ShardedParameters::BeginGradient(const ParameterUnit& unit) {
  const Timed timed(*context_, StageName::kGradients);
  const TensorView shard = UnitShard(gradients_, unit);
  GatheredUnit gradient{.buffer = {}, .data = shard.data, .unit = &unit};
  if (SharesUnits() || OnHost()) {
    UPIPE_ASSIGN_OR_RETURN(gradient.buffer,
                           context_->AllocateFloats(MemoryTag::kGradients, unit.num_elements));
    gradient.data = gradient.buffer.data();
  }
  if (!SharesUnits() && WasReduced(unit)) {  // its second part is added to the first
    if (OnHost()) Fetch(shard, gradient.data);
    return gradient;
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
  if (!again) reduced_.push_back(&unit);
  if (!SharesUnits()) {
    if (OnHost()) Leave(std::move(gradient.buffer), UnitShard(gradients_, unit));
    return absl::OkStatus();
  }
  const Timed timed(*context_, StageName::kGradients);
  AwaitLeft();
  UPIPE_ASSIGN_OR_RETURN(ShardOnDevice home, GradientShard(unit, /*fetched=*/again));
  TensorView destination = home.view;
  Buffer sum;
  if (again) {
    UPIPE_ASSIGN_OR_RETURN(sum,
                           context_->AllocateFloats(MemoryTag::kGradients, unit.shard_elements));
    destination.data = sum.data();
  }
  UPIPE_ASSIGN_OR_RETURN(
      const Buffer scratch,
      context_->Allocate(MemoryTag::kComm,
                         context_->comm().ReduceScatterScratchBytes(static_cast<int>(group_.size()),
                                                                    unit.shard_elements)));
  UPIPE_RETURN_IF_ERROR(context_->comm().ReduceScatter(
      group_, static_cast<const float*>(gradient.data), destination.as<float>(),
      unit.shard_elements, scratch.data(), context_->stream()));
  if (again) {
    UPIPE_RETURN_IF_ERROR(context_->Run(kernels::StridedCopyParams{
        .src = destination.AsTensor3(), .dst = home.view.AsTensor3(), .accumulate = true}));
  }
  if (OnHost()) Leave(std::move(home.buffer), UnitShard(gradients_, unit));
  return absl::OkStatus();
}

absl::Status ShardedParameters::ReduceOverReplicas() {
  if (replicas_.size() > 1) {
    const Timed timed(*context_, StageName::kGradients);
    for (const ParameterUnit* unit : layout_->Units()) {
      AwaitLeft();
      UPIPE_ASSIGN_OR_RETURN(ShardOnDevice shard, GradientShard(*unit, /*fetched=*/true));
      UPIPE_RETURN_IF_ERROR(SumOverReplicas(shard.view));
      if (OnHost()) Leave(std::move(shard.buffer), UnitShard(gradients_, *unit));
    }
  }
  AwaitLeft();
  return absl::OkStatus();
}

absl::Status ShardedParameters::SumOverReplicas(const TensorView& shard) {
  const int replicas = static_cast<int>(replicas_.size());
  const int64_t part = shard.shape[0] / replicas;
  UPIPE_ASSIGN_OR_RETURN(const Buffer sum, context_->AllocateFloats(MemoryTag::kGradients, part));
  UPIPE_ASSIGN_OR_RETURN(
      const Buffer scratch,
      context_->Allocate(MemoryTag::kComm,
                         context_->comm().ReduceScatterScratchBytes(replicas, part)));
  UPIPE_RETURN_IF_ERROR(context_->comm().ReduceScatter(replicas_, shard.as<float>(),
                                                       static_cast<float*>(sum.data()), part,
                                                       scratch.data(), context_->stream()));
  return context_->comm().AllGather(replicas_, sum.data(), shard.data,
                                    part * static_cast<int64_t>(sizeof(float)), context_->stream());
}

absl::StatusOr<ShardedParameters::ShardOnDevice> ShardedParameters::GradientShard(
    const ParameterUnit& unit, bool fetched) {
  ShardOnDevice shard{.buffer = {}, .view = UnitShard(gradients_, unit)};
  if (!OnHost()) return shard;
  UPIPE_ASSIGN_OR_RETURN(shard.buffer,
                         context_->AllocateFloats(MemoryTag::kGradients, unit.shard_elements));
  if (fetched) Fetch(shard.view, shard.buffer.data());
  shard.view.data = shard.buffer.data();
  return shard;
}

void ShardedParameters::Fetch(const TensorView& host, void* device) {
  kernels::Stream& copy = *context_->streams().copy;
  copy.Wait(context_->stream().Record());
  {
    const Timed offload(context_->On(copy), StageName::kOffload);
    context_->device().CopyFromHost(device, host.data, host.num_bytes(), copy);
  }
  const Waiting waiting(*context_);
  context_->stream().Wait(copy.Record());
}

void ShardedParameters::Leave(Buffer buffer, const TensorView& host) {
  AwaitLeft();
  kernels::Stream& copy = *context_->streams().copy;
  copy.Wait(context_->stream().Record());
  const Timed offload(context_->On(copy), StageName::kOffload);
  context_->device().CopyToHost(host.data, buffer.data(), host.num_bytes(), copy);
  left_ = copy.Record();
  leaving_ = std::move(buffer);
}

void ShardedParameters::AwaitLeft() {
  if (!leaving_) return;
  const Waiting waiting(*context_);
  context_->stream().Wait(left_);
  leaving_.Free();
}

}  // namespace upipe::model
