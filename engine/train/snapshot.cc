#include "engine/train/snapshot.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::train {
namespace {

using kernels::TensorView;

constexpr int kNumKinds = 3;
constexpr int64_t kFloatBytes = sizeof(float);
// Elements that travel at a time on their way to the device.
constexpr int64_t kStagingElements = 64 * checkpoint::kBlockElements;

struct Kind {
  v1::ValueKind kind;
  TensorView shard;
};
std::vector<Kind> KindsOf(const model::ShardedParameters& parameters) {
  return {{v1::VALUE_KIND_WEIGHT, parameters.weights()},
          {v1::VALUE_KIND_FIRST_MOMENT, parameters.first_moments()},
          {v1::VALUE_KIND_SECOND_MOMENT, parameters.second_moments()}};
}

}  // namespace

absl::StatusOr<Snapshot> Snapshot::Create(const engine::RankContext& context,
                                          const model::ShardedParameters& parameters) {
  Snapshot snapshot;
  const int replica = context.at().dp;
  const int replicas = context.mesh().dp_ranks;
  for (const model::ParameterUnit* unit : parameters.layout().Units()) {
    const int64_t part = unit->shard_elements / replicas;
    snapshot.copies_.push_back({.shard_begin = unit->shard_offset + replica * part,
                                .begin = snapshot.elements_,
                                .count = part});
    snapshot.elements_ += part;
  }
  UPIPE_ASSIGN_OR_RETURN(snapshot.memory_,
                         context.AllocateHost(kernels::MemoryTag::kCheckpoint,
                                              kNumKinds * snapshot.elements_ * kFloatBytes));
  const auto* memory = static_cast<const float*>(snapshot.memory_.data());
  for (const Kind& kind : KindsOf(parameters)) {
    for (const Copy& copy : snapshot.copies_) {
      for (const auto& piece : parameters.pieces()) {
        const int64_t begin = std::max(piece.shard_begin, copy.shard_begin);
        const int64_t end =
            std::min(piece.shard_begin + piece.count, copy.shard_begin + copy.count);
        if (begin >= end) continue;
        snapshot.pieces_.push_back({.tensor = piece.tensor->name,
                                    .kind = kind.kind,
                                    .offset = piece.tensor_begin + begin - piece.shard_begin,
                                    .count = end - begin,
                                    .data = memory + copy.begin + begin - copy.shard_begin});
      }
    }
    memory += snapshot.elements_;
  }
  return snapshot;
}

absl::Status Snapshot::Take(const engine::RankContext& context,
                            const model::ShardedParameters& parameters) {
  const bool on_host = parameters.place() == engine::Place::kHost;
  auto* memory = static_cast<float*>(memory_.data());
  if (on_host) context.streams().host->Wait(context.stream().Record());
  const engine::Timed copying(on_host ? context.On(*context.streams().host) : context,
                              engine::StageName::kOffload);
  for (const Kind& kind : KindsOf(parameters)) {
    for (const Copy& copy : copies_) {
      const TensorView from = kind.shard.Rows(copy.shard_begin, copy.count);
      const TensorView to =
          TensorView::Vector(memory + copy.begin, kernels::DType::kFloat32, copy.count);
      if (on_host) {
        UPIPE_RETURN_IF_ERROR(context.RunOnHost(
            kernels::StridedCopyParams{.src = from.AsTensor3(), .dst = to.AsTensor3()}));
      } else {
        context.device().CopyToHost(to.data, from.data, from.num_bytes(), context.stream());
      }
    }
    memory += elements_;
  }
  return on_host ? context.streams().host->Synchronize() : context.stream().Synchronize();
}

absl::Status RestoreShards(const engine::RankContext& context,
                           const model::ShardedParameters& parameters,
                           const checkpoint::Content& content, const std::atomic<bool>* stop) {
  const bool on_host = parameters.place() == engine::Place::kHost;
  UPIPE_RETURN_IF_ERROR(context.streams().host->Synchronize());
  UPIPE_RETURN_IF_ERROR(context.stream().Synchronize());
  std::vector<float> staging;
  for (const Kind& kind : KindsOf(parameters)) {
    for (const auto& piece : parameters.pieces()) {
      for (int64_t done = 0; done < piece.count;) {
        if (stop != nullptr && *stop) return absl::CancelledError("asked to stop while restoring");
        // To the end of a block of the tensor, so that none is read twice.
        const int64_t offset = piece.tensor_begin + done;
        const int64_t end = std::min(piece.tensor_begin + piece.count,
                                     (offset / kStagingElements + 1) * kStagingElements);
        const TensorView to = kind.shard.Rows(piece.shard_begin + done, end - offset);
        float* read_to = to.as<float>();
        if (!on_host) {
          staging.resize(std::max<size_t>(staging.size(), end - offset));
          read_to = staging.data();
        }
        UPIPE_RETURN_IF_ERROR(
            content.Read(piece.tensor->name, kind.kind, offset, end - offset, read_to));
        if (!on_host) {
          context.device().CopyFromHost(to.data, staging.data(), to.num_bytes(), context.stream());
          UPIPE_RETURN_IF_ERROR(context.stream().Synchronize());
        }
        done += end - offset;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::train
