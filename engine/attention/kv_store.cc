#include "engine/attention/kv_store.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status.h"
#include "kernels/api/attention_pairs.h"

namespace upipe::attention {

using engine::Place;
using engine::RankContext;
using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr KvTensor kTensors[] = {KvTensor::kKeys, KvTensor::kValues, KvTensor::kKeyGradients,
                                 KvTensor::kValueGradients};

bool IsGradient(KvTensor tensor) { return tensor >= KvTensor::kKeyGradients; }
// Nobody reads it any more when its gradient is complete.
KvTensor DeadBeside(KvTensor gradient) {
  return gradient == KvTensor::kKeyGradients ? KvTensor::kKeys : KvTensor::kValues;
}

absl::Status Add(const RankContext& context, const TensorView& part, const TensorView& sum) {
  return context.Run(kernels::StridedCopyParams{.src = part, .dst = sum, .accumulate = true});
}

}  // namespace

void Order(const RankContext& earlier, const RankContext& later) {
  if (&earlier.stream() != &later.stream()) later.stream().Wait(earlier.stream().Record());
}

KvStore::KvStore(const Params& p)
    : streams_(p.streams),
      views_(p.views),
      mask_(p.mask),
      overlap_(p.policy.overlap),
      gradients_(p.gradients),
      num_slots_(p.views.schedule().num_kv_slots()) {
  const int ring = views_.ring_ranks();
  const int64_t shard = views_.shard_tokens();
  num_places_ = num_slots_;
  rows_ = shard;
  if (p.policy.stage_kv == Place::kHost) {
    UPIPE_CHECK(ring == 1) << "keys that wait on the host do not go round a ring";
    layout_ = Layout::kHost;
    num_parts_ = static_cast<int>(views_.num_chunks());
    rows_ = views_.chunk_tokens();
    num_places_ = (overlap_ ? 3 : 2) * num_slots_;
    touched_.assign(num_parts_ * num_slots_, false);
  } else if (ring > 1) {
    layout_ = p.policy.ring_keeps_kv ? Layout::kKeep : Layout::kPass;
    num_parts_ = ring;
    if (layout_ == Layout::kPass) {
      num_places_ = 2 * num_slots_;
      turned_.assign(num_slots_, false);
    } else {
      rows_ = ring * shard;
    }
  }
}

absl::StatusOr<KvStore> KvStore::Create(const Params& params) {
  KvStore store(params);
  UPIPE_RETURN_IF_ERROR(store.Allocate());
  return store;
}

absl::Status KvStore::Allocate() {
  for (KvTensor tensor : kTensors) {
    if (IsGradient(tensor) && !gradients_) continue;
    const MemoryTag tag = IsGradient(tensor) ? MemoryTag::kAttnGrad : MemoryTag::kAttnKv;
    const int index = static_cast<int>(tensor);
    const int64_t place_bytes = rows_ * views_.head_dim() * SizeOf(TypeOf(tensor));
    UPIPE_ASSIGN_OR_RETURN(device_[index],
                           streams_.compute.Allocate(tag, num_places_ * place_bytes));
    if (layout_ != Layout::kHost) continue;
    UPIPE_ASSIGN_OR_RETURN(
        host_[index], streams_.compute.AllocateHost(tag, num_parts_ * num_slots_ * place_bytes));
  }
  return absl::OkStatus();
}

DType KvStore::TypeOf(KvTensor tensor) const { return IsGradient(tensor) ? kF32 : views_.stored(); }

TensorView KvStore::All(KvTensor tensor) const {
  if (IsGradient(tensor) && !gradients_) return {};
  return HeadBlocks(device_[static_cast<int>(tensor)].data(), TypeOf(tensor), rows_, num_places_,
                    views_.head_dim());
}

TensorView KvStore::At(KvTensor tensor, int64_t place) const {
  return HeadBlocks(All(tensor).At(0, place), TypeOf(tensor), rows_, 1, views_.head_dim());
}

int64_t KvStore::PlaceOf(int slot) const {
  return layout_ == Layout::kPass && turned_[slot] ? num_slots_ + slot : slot;
}

std::vector<int32_t> KvStore::PlacesOfQueries(int stage, int64_t first_place) const {
  std::vector<int32_t> places;
  for (int slot : views_.SlotOfQueries(stage)) {
    places.push_back(static_cast<int32_t>(first_place + PlaceOf(slot)));
  }
  return places;
}

std::vector<int> KvStore::SlotsOf(int stage,
                                  const google::protobuf::RepeatedField<int32_t>& kv_heads) const {
  std::vector<int> slots;
  for (int32_t head : kv_heads) slots.push_back(views_.SlotOf(stage, head));
  return slots;
}

std::vector<int> KvStore::ActiveSlots(int stage) const {
  return SlotsOf(stage, views_.OwnWork(stage).kv_heads());
}

// ---- fetch

void KvStore::BeginFetch(int stage) {
  if (layout_ != Layout::kPass) return;
  for (int slot : SlotsOf(stage, views_.OwnWork(stage).fetch())) turned_[slot] = false;
}

TensorView KvStore::Landing(KvTensor tensor, int slot, int64_t chunk) const {
  const int64_t tokens = views_.chunk_tokens();
  switch (layout_) {
    case Layout::kHost:
      return At(tensor, HostPlace(LandingBuffer(chunk), slot));
    case Layout::kKeep:
      return At(tensor, slot).Rows(views_.ring() * views_.shard_tokens() + chunk * tokens, tokens);
    default:
      return At(tensor, PlaceOf(slot)).Rows(chunk * tokens, tokens);
  }
}

absl::Status KvStore::Landed(int stage, int64_t chunk) {
  if (layout_ != Layout::kHost) return absl::OkStatus();
  const RankContext copy = streams_.side.On(*streams_.side.streams().copy);
  Order(streams_.side, copy);
  for (int slot : SlotsOf(stage, views_.OwnWork(stage).fetch())) {
    for (KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
      CopySlot(tensor, slot, chunk, LandingBuffer(chunk), /*to_host=*/true);
    }
    touched_[chunk * num_slots_ + slot] = false;
  }
  Order(copy, streams_.side);
  return absl::OkStatus();
}

absl::Status KvStore::Fetched(int stage) {
  if (layout_ == Layout::kKeep) UPIPE_RETURN_IF_ERROR(GatherShards(stage));
  if (!gradients_ || layout_ == Layout::kHost) return absl::OkStatus();
  for (int slot : SlotsOf(stage, views_.OwnWork(stage).fetch())) {
    for (KvTensor gradient : {KvTensor::kKeyGradients, KvTensor::kValueGradients}) {
      UPIPE_RETURN_IF_ERROR(streams_.side.Fill(At(gradient, PlaceOf(slot)), 0));
    }
  }
  return absl::OkStatus();
}

absl::Status KvStore::GatherShards(int stage) {
  const int64_t shard = views_.shard_tokens();
  comm::AllToAllVParams exchange;
  for (int slot : SlotsOf(stage, views_.OwnWork(stage).fetch())) {
    for (KvTensor tensor : {KvTensor::kKeys, KvTensor::kValues}) {
      const TensorView shards = At(tensor, slot);
      const TensorView own = shards.Rows(views_.ring() * shard, shard);
      for (int peer = 0; peer < views_.ring_ranks(); ++peer) {
        if (peer == views_.ring()) continue;
        const int rank = views_.RingPeer(peer);
        exchange.sends.push_back({rank, own.data, own.num_bytes()});
        exchange.receives.push_back({rank, shards.At(peer * shard), own.num_bytes()});
      }
    }
  }
  return streams_.side.comm().AllToAllV(exchange, streams_.side.stream());
}

// ---- attention

absl::Status KvStore::ForEachPart(const Turn& turn, const Body& body) {
  const int ring = views_.ring_ranks();
  const int64_t shard = views_.shard_tokens();
  switch (layout_) {
    case Layout::kPass:
      return Rotate(turn, body);
    case Layout::kHost:
      return StreamChunks(turn, body);
    default:
      for (int hop = 0; hop < ring; ++hop) {
        const int at = (views_.ring() - hop + ring) % ring;
        const auto rows = [&](KvTensor tensor) {
          const TensorView all = All(tensor);
          return ring == 1 || !all.present() ? all : all.Rows(at * shard, shard);
        };
        UPIPE_RETURN_IF_ERROR(body({.k = rows(KvTensor::kKeys),
                                    .v = rows(KvTensor::kValues),
                                    .dk = rows(KvTensor::kKeyGradients),
                                    .dv = rows(KvTensor::kValueGradients),
                                    .places = PlacesOfQueries(turn.stage, 0),
                                    .runs = views_.tokens().ShardRuns(at, 0, shard)}));
      }
      return absl::OkStatus();
  }
}

// After its last hop a head's K/V are needed at home only if a later turn attends with them.
bool KvStore::AnyoneNeedsHome(const Turn& turn) const {
  const auto& stage = views_.schedule().stages(turn.stage);
  return std::any_of(stage.ranks().begin(), stage.ranks().end(), [&](const auto& work) {
    return turn.chunk + 1 < views_.num_chunks() ? work.kv_heads_size() > 0
                                                : work.kv_heads_size() > work.release_size();
  });
}

absl::Status KvStore::Pass(std::vector<KvTensor> tensors, const std::vector<int>& slots) {
  const int ring = views_.ring_ranks();
  const int next = views_.RingPeer((views_.ring() + 1) % ring);
  const int previous = views_.RingPeer((views_.ring() + ring - 1) % ring);
  comm::AllToAllVParams exchange;
  for (KvTensor tensor : tensors) {
    for (int slot : slots) {
      const int64_t from = PlaceOf(slot);
      const TensorView content = At(tensor, from);
      const TensorView room = At(tensor, from == slot ? num_slots_ + slot : slot);
      exchange.sends.push_back({next, content.data, content.num_bytes()});
      exchange.receives.push_back({previous, room.data, content.num_bytes()});
    }
  }
  Order(streams_.compute, streams_.ring);
  return streams_.ring.comm().AllToAllV(exchange, streams_.ring.stream());
}

absl::Status KvStore::Rotate(const Turn& turn, const Body& body) {
  const int ring = views_.ring_ranks();
  const std::vector<int> slots = ActiveSlots(turn.stage);
  const auto& own = views_.OwnWork(turn.stage);
  std::vector<int> staying;
  for (int32_t head : own.kv_heads()) {
    const bool released =
        std::find(own.release().begin(), own.release().end(), head) != own.release().end();
    if (!released || turn.chunk + 1 < views_.num_chunks()) {
      staying.push_back(views_.SlotOf(turn.stage, head));
    }
  }
  for (int hop = 0; hop < ring; ++hop) {
    const int at = (views_.ring() - hop + ring) % ring;
    const bool last = hop == ring - 1;
    if (!last || AnyoneNeedsHome(turn)) {
      UPIPE_RETURN_IF_ERROR(Pass({KvTensor::kKeys, KvTensor::kValues}, last ? staying : slots));
    }
    UPIPE_RETURN_IF_ERROR(body({.k = All(KvTensor::kKeys),
                                .v = All(KvTensor::kValues),
                                .dk = All(KvTensor::kKeyGradients),
                                .dv = All(KvTensor::kValueGradients),
                                .places = PlacesOfQueries(turn.stage, 0),
                                .runs = views_.tokens().ShardRuns(at, 0, views_.shard_tokens())}));
    if (gradients_) {
      UPIPE_RETURN_IF_ERROR(Pass({KvTensor::kKeyGradients, KvTensor::kValueGradients}, slots));
    }
    for (int slot : slots) turned_[slot] = !turned_[slot];
    Order(streams_.ring, streams_.compute);
  }
  return absl::OkStatus();
}

void KvStore::CopySlot(KvTensor tensor, int slot, int64_t chunk, int64_t buffer, bool to_host) {
  const TensorView device = At(tensor, HostPlace(buffer, slot));
  char* host = static_cast<char*>(host_[static_cast<int>(tensor)].data()) +
               (chunk * num_slots_ + slot) * device.num_bytes();
  kernels::Device& through = streams_.compute.device();
  kernels::Stream& copy = *streams_.compute.streams().copy;
  if (to_host) {
    through.CopyToHost(host, device.data, device.num_bytes(), copy);
  } else {
    through.CopyFromHost(device.data, host, device.num_bytes(), copy);
  }
}

std::vector<int64_t> KvStore::VisibleChunks(int64_t query_chunk) const {
  std::vector<int64_t> visible;
  const int64_t tokens = views_.chunk_tokens();
  for (int64_t chunk = 0; chunk < num_parts_; ++chunk) {
    for (const auto& queries : views_.QueryRuns(query_chunk)) {
      const auto keys =
          views_.tokens().ShardRuns(views_.ring(), chunk * tokens, (chunk + 1) * tokens);
      const bool any = std::any_of(keys.begin(), keys.end(), [&](const auto& run) {
        return kernels::VisiblePairs(mask_, queries, run) > 0;
      });
      if (any && (visible.empty() || visible.back() != chunk)) visible.push_back(chunk);
    }
  }
  return visible;
}

void KvStore::LoadChunk(const std::vector<int>& slots, int64_t chunk, int64_t buffer) {
  streams_.compute.streams().copy->Wait(chunk_used_[buffer]);
  for (KvTensor tensor : kTensors) {
    if (IsGradient(tensor) && !gradients_) continue;
    for (int slot : slots) {
      if (IsGradient(tensor) && !touched_[chunk * num_slots_ + slot]) continue;
      CopySlot(tensor, slot, chunk, buffer, /*to_host=*/false);
    }
  }
}

absl::Status KvStore::ClearUntouched(const std::vector<int>& slots, int64_t chunk, int64_t buffer) {
  for (int slot : slots) {
    if (!gradients_ || touched_[chunk * num_slots_ + slot]) continue;
    touched_[chunk * num_slots_ + slot] = true;
    for (KvTensor gradient : {KvTensor::kKeyGradients, KvTensor::kValueGradients}) {
      UPIPE_RETURN_IF_ERROR(streams_.compute.Fill(At(gradient, HostPlace(buffer, slot)), 0));
    }
  }
  return absl::OkStatus();
}

absl::Status KvStore::StreamChunks(const Turn& turn, const Body& body) {
  const RankContext& compute = streams_.compute;
  const RankContext copy = compute.On(*compute.streams().copy);
  const std::vector<int64_t> chunks = VisibleChunks(turn.chunk);
  const std::vector<int> slots = ActiveSlots(turn.stage);
  const int64_t tokens = views_.chunk_tokens();
  Order(compute, copy);
  LoadChunk(slots, chunks[0], 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t buffer = static_cast<int64_t>(i % 2), chunk = chunks[i];
    Order(copy, compute);
    // Before this part's gradients go back, so that the next is on its way meanwhile.
    if (i + 1 < chunks.size()) LoadChunk(slots, chunks[i + 1], 1 - buffer);
    UPIPE_RETURN_IF_ERROR(ClearUntouched(slots, chunk, buffer));
    UPIPE_RETURN_IF_ERROR(body(
        {.k = All(KvTensor::kKeys),
         .v = All(KvTensor::kValues),
         .dk = All(KvTensor::kKeyGradients),
         .dv = All(KvTensor::kValueGradients),
         .places = PlacesOfQueries(turn.stage, HostPlace(buffer, 0)),
         .runs = views_.tokens().ShardRuns(views_.ring(), chunk * tokens, (chunk + 1) * tokens)}));
    chunk_used_[buffer] = compute.stream().Record();
    if (!gradients_) continue;
    copy.stream().Wait(chunk_used_[buffer]);
    for (int slot : slots) {
      CopySlot(KvTensor::kKeyGradients, slot, chunk, buffer, /*to_host=*/true);
      CopySlot(KvTensor::kValueGradients, slot, chunk, buffer, /*to_host=*/true);
    }
  }
  Order(copy, compute);
  return absl::OkStatus();
}

// ---- release

absl::Status KvStore::BeginRelease(int stage, KvTensor gradient) {
  return layout_ == Layout::kKeep ? ReduceShards(stage, gradient) : absl::OkStatus();
}

// Where the part of ring rank `ring_rank` for the own shard arrives, [M, 1, D] fp32: in the K and V
// shards of the slot, which are dead. Others' parts only, one after the other.
TensorView KvStore::Contribution(int slot, int ring_rank) const {
  const int64_t index = ring_rank < views_.ring() ? ring_rank : ring_rank - 1;
  const int64_t block_bytes = views_.shard_tokens() * views_.head_dim() * SizeOf(kF32);
  const int64_t in_keys = At(KvTensor::kKeys, slot).num_bytes() / block_bytes;
  const KvTensor home = index < in_keys ? KvTensor::kKeys : KvTensor::kValues;
  void* data = static_cast<char*>(At(home, slot).data) + index % in_keys * block_bytes;
  return HeadBlocks(data, kF32, views_.shard_tokens(), 1, views_.head_dim());
}

// The sum over the ring, [M, 1, D] fp32, once ReduceShards has run.
TensorView KvStore::ReducedShard(KvTensor gradient, int slot) const {
  if (views_.ring() > 0) return Contribution(slot, 0);
  return At(gradient, slot).Rows(0, views_.shard_tokens());
}

// Room for its rounded form, [M, 1, D]: what has been added and is dead.
TensorView KvStore::NarrowShard(KvTensor gradient, int slot) const {
  const int64_t shard = views_.shard_tokens();
  void* data =
      views_.ring() > 0 ? At(gradient, slot).At(views_.ring() * shard) : Contribution(slot, 1).data;
  return HeadBlocks(data, views_.stored(), shard, 1, views_.head_dim());
}

absl::Status KvStore::ReduceShards(int stage, KvTensor gradient) {
  const int64_t shard = views_.shard_tokens();
  const std::vector<int> slots = SlotsOf(stage, views_.OwnWork(stage).release());
  comm::AllToAllVParams exchange;
  for (int slot : slots) {
    for (int peer = 0; peer < views_.ring_ranks(); ++peer) {
      if (peer == views_.ring()) continue;
      const TensorView theirs = At(gradient, slot).Rows(peer * shard, shard);
      const TensorView ours = Contribution(slot, peer);
      exchange.sends.push_back({views_.RingPeer(peer), theirs.data, theirs.num_bytes()});
      exchange.receives.push_back({views_.RingPeer(peer), ours.data, ours.num_bytes()});
    }
  }
  UPIPE_RETURN_IF_ERROR(streams_.side.comm().AllToAllV(exchange, streams_.side.stream()));
  for (int slot : slots) {
    const TensorView sum = ReducedShard(gradient, slot);
    for (int peer = 1; peer < views_.ring_ranks(); ++peer) {  // ascending, from rank 0's part on
      const TensorView part = peer == views_.ring() ? At(gradient, slot).Rows(peer * shard, shard)
                                                    : Contribution(slot, peer);
      UPIPE_RETURN_IF_ERROR(Add(streams_.side, part, sum));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorView> KvStore::Released(KvTensor gradient, int slot, int64_t chunk) {
  const RankContext& side = streams_.side;
  const int64_t tokens = views_.chunk_tokens();
  TensorView sum, narrow;
  switch (layout_) {
    case Layout::kKeep:
      sum = ReducedShard(gradient, slot).Rows(chunk * tokens, tokens);
      narrow = NarrowShard(gradient, slot).Rows(chunk * tokens, tokens);
      break;
    case Layout::kHost: {
      const int64_t buffer = LandingBuffer(0);
      const RankContext copy = side.On(*side.streams().copy);
      Order(side, copy);
      CopySlot(gradient, slot, chunk, buffer, /*to_host=*/false);
      Order(copy, side);
      sum = At(gradient, HostPlace(buffer, slot));
      narrow = At(DeadBeside(gradient), HostPlace(buffer, slot));
      break;
    }
    default:
      sum = At(gradient, PlaceOf(slot)).Rows(chunk * tokens, tokens);
      narrow = At(DeadBeside(gradient), PlaceOf(slot)).Rows(chunk * tokens, tokens);
  }
  if (views_.stored() == kF32) return sum;
  UPIPE_RETURN_IF_ERROR(side.Run(kernels::StridedCopyParams{.src = sum, .dst = narrow}));
  return narrow;
}

}  // namespace upipe::attention
