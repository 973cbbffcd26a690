#include "engine/attention/kv_store.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "common/status.h"
#include "engine/step_clock.h"
#include "kernels/api/attention_pairs.h"

namespace upipe::attention {

using engine::Place;
using engine::RankContext;
using engine::StageName;
using engine::Timed;
using engine::Waiting;
using kernels::DType;
using kernels::MemoryTag;
using kernels::TensorView;

namespace {

constexpr DType kF32 = DType::kFloat32;
constexpr KvTensor kKeysAndValues[] = {KvTensor::kKeys, KvTensor::kValues};
constexpr KvTensor kGradients[] = {KvTensor::kKeyGradients, KvTensor::kValueGradients};
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
      gradients_(p.gradients),
      num_slots_(p.views.schedule().num_kv_slots()) {
  rows_ = views_.shard_tokens();
  if (p.policy.stage_kv == Place::kHost) {
    UPIPE_CHECK(views_.ring_ranks() == 1) << "keys that wait on the host do not go round a ring";
    layout_ = Layout::kHost;
    num_parts_ = static_cast<int>(views_.num_chunks());
    rows_ = views_.chunk_tokens();
    for (int stage = 1; p.policy.overlap && stage < views_.schedule().stages_size(); ++stage) {
      if (views_.OwnWork(stage).fetch_size() > 0) lands_apart_ = true;
    }
    last_seen_by_.resize(num_parts_);
    for (int64_t queries = 0; queries < num_parts_; ++queries) {
      visible_.push_back(VisibleChunks(queries));
      for (int64_t chunk : visible_.back()) last_seen_by_[chunk] = queries;
    }
  } else if (views_.ring_ranks() > 1) {
    layout_ = p.policy.ring_keeps_kv ? Layout::kKeep : Layout::kPass;
    num_parts_ = views_.ring_ranks();
    if (layout_ == Layout::kKeep) rows_ *= views_.ring_ranks();
  }
  CountPlaces();
}

// Stage slots are enough for gradients where they leave at the end of the last turn. Kept ones are
// reduced on the side stream with K/V as the room for others' parts: they need slots as K/V do.
void KvStore::CountPlaces() {
  parallel::StageSlots stage_slots = parallel::StageSlotsOf(views_.schedule(), views_.ulysses());
  stage_slots_ = std::move(stage_slots.slots);
  num_stage_slots_ = layout_ == Layout::kKeep ? num_slots_ : stage_slots.count;
  num_kv_places_ = num_slots_;
  num_gradient_places_ = num_stage_slots_;
  if (layout_ == Layout::kPass) {
    num_kv_places_ += num_stage_slots_;
    num_gradient_places_ += num_stage_slots_;
  } else if (layout_ == Layout::kHost) {
    num_kv_places_ = (lands_apart_ ? 3 : 2) * num_stage_slots_;
    num_gradient_places_ = 2 * num_stage_slots_;
    touched_.assign(num_parts_ * num_stage_slots_, false);
  }
  kv_.content.resize(num_slots_);
  std::iota(kv_.content.begin(), kv_.content.end(), 0);
  gradient_.content.resize(num_stage_slots_);
  std::iota(gradient_.content.begin(), gradient_.content.end(), 0);
  kv_.room.resize(num_stage_slots_);
  std::iota(kv_.room.begin(), kv_.room.end(), num_slots_);
  gradient_.room.resize(num_stage_slots_);
  std::iota(gradient_.room.begin(), gradient_.room.end(), num_stage_slots_);
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
    const int64_t places = IsGradient(tensor) ? num_gradient_places_ : num_kv_places_;
    UPIPE_ASSIGN_OR_RETURN(device_[index], streams_.compute.Allocate(tag, places * place_bytes));
    if (layout_ != Layout::kHost) continue;
    const int64_t waiting = num_parts_ * (IsGradient(tensor) ? num_stage_slots_ : num_slots_);
    UPIPE_ASSIGN_OR_RETURN(host_[index], streams_.compute.AllocateHost(tag, waiting * place_bytes));
  }
  return absl::OkStatus();
}

DType KvStore::TypeOf(KvTensor tensor) const { return IsGradient(tensor) ? kF32 : views_.stored(); }

TensorView KvStore::All(KvTensor tensor) const {
  if (IsGradient(tensor) && !gradients_) return {};
  const int64_t places = IsGradient(tensor) ? num_gradient_places_ : num_kv_places_;
  return HeadBlocks(device_[static_cast<int>(tensor)].data(), TypeOf(tensor), rows_, places,
                    views_.head_dim());
}

TensorView KvStore::At(KvTensor tensor, int64_t place) const {
  return HeadBlocks(All(tensor).At(0, place), TypeOf(tensor), rows_, 1, views_.head_dim());
}

int64_t KvStore::PlaceOf(KvTensor tensor, const Resident& head, int64_t buffer) const {
  if (layout_ == Layout::kHost) return buffer * num_stage_slots_ + head.stage_slot;
  return IsGradient(tensor) ? gradient_.content[head.stage_slot] : kv_.content[head.slot];
}

std::vector<int32_t> KvStore::PlacesOfQueries(KvTensor tensor, int stage, int64_t buffer) const {
  std::vector<int32_t> places;
  for (int32_t head : views_.OwnWork(stage).query_heads()) {
    const int64_t place = PlaceOf(tensor, Of(stage, views_.KvHeadOf(head)), buffer);
    places.push_back(static_cast<int32_t>(place));
  }
  return places;
}

KvStore::Resident KvStore::Of(int stage, int32_t kv_head) const {
  const auto& own = views_.OwnWork(stage);
  const auto it = std::find(own.kv_heads().begin(), own.kv_heads().end(), kv_head);
  UPIPE_CHECK(it != own.kv_heads().end()) << "K/V head " << kv_head << " at stage " << stage;
  const int index = static_cast<int>(it - own.kv_heads().begin());
  const int slot = own.kv_slots(index);
  return {slot, layout_ == Layout::kKeep ? slot : stage_slots_[stage][index]};
}

std::vector<KvStore::Resident> KvStore::Of(int stage, const HeadList& kv_heads) const {
  std::vector<Resident> residents;
  for (int32_t head : kv_heads) residents.push_back(Of(stage, head));
  return residents;
}

std::vector<KvStore::Resident> KvStore::Active(int stage) const {
  return Of(stage, views_.OwnWork(stage).kv_heads());
}

absl::Status KvStore::Clear(const Resident& head, int64_t buffer) {
  for (KvTensor gradient : kGradients) {
    const TensorView place = At(gradient, PlaceOf(gradient, head, buffer));
    UPIPE_RETURN_IF_ERROR(streams_.compute.Fill(place, 0));
  }
  return absl::OkStatus();
}

// To the places of their keys and values, rounded to the storage type.
absl::Status KvStore::MoveGradients(const std::vector<Resident>& heads, int64_t buffer) {
  for (const Resident& head : heads) {
    for (KvTensor gradient : kGradients) {
      const KvTensor dead = DeadBeside(gradient);
      UPIPE_RETURN_IF_ERROR(streams_.compute.Run(
          kernels::StridedCopyParams{.src = At(gradient, PlaceOf(gradient, head, buffer)),
                                     .dst = At(dead, PlaceOf(dead, head, buffer))}));
    }
  }
  return absl::OkStatus();
}

// ---- fetch

TensorView KvStore::Landing(KvTensor tensor, const Turn& turn, int32_t kv_head) const {
  const Resident head = Of(turn.stage, kv_head);
  const int64_t tokens = views_.chunk_tokens();
  switch (layout_) {
    case Layout::kHost:
      return At(tensor, PlaceOf(tensor, head, LandingBuffer(turn.chunk)));
    case Layout::kKeep:
      return At(tensor, head)
          .Rows(views_.ring() * views_.shard_tokens() + turn.chunk * tokens, tokens);
    default:
      return At(tensor, head).Rows(turn.chunk * tokens, tokens);
  }
}

absl::Status KvStore::Landed(const Turn& turn) {
  if (layout_ != Layout::kHost) return absl::OkStatus();
  const RankContext copy = streams_.side.On(*streams_.side.streams().copy);
  Order(streams_.side, copy);
  const Timed offload(copy, StageName::kOffload, turn.stage);
  for (const Resident& head : Of(turn.stage, views_.OwnWork(turn.stage).fetch())) {
    for (KvTensor tensor : kKeysAndValues) {
      CopyChunk(tensor, head, turn.chunk, LandingBuffer(turn.chunk), /*to_host=*/true);
    }
  }
  Order(copy, streams_.side);
  return absl::OkStatus();
}

absl::Status KvStore::Fetched(int stage) {
  return layout_ == Layout::kKeep ? GatherShards(stage) : absl::OkStatus();
}

absl::Status KvStore::GatherShards(int stage) {
  const int64_t shard = views_.shard_tokens();
  comm::AllToAllVParams exchange{.ring = true};
  for (const Resident& head : Of(stage, views_.OwnWork(stage).fetch())) {
    for (KvTensor tensor : kKeysAndValues) {
      const TensorView shards = At(tensor, head);
      const TensorView own = shards.Rows(views_.ring() * shard, shard);
      for (int peer = 0; peer < views_.ring_ranks(); ++peer) {
        if (peer == views_.ring()) continue;
        const int rank = views_.RingPeer(peer);
        exchange.sends.push_back({rank, own.data, own.num_bytes()});
        exchange.receives.push_back({rank, shards.At(peer * shard), own.num_bytes()});
      }
    }
  }
  const Timed timed(streams_.side, StageName::kExchange, stage);
  return streams_.side.comm().AllToAllV(exchange, streams_.side.stream());
}

// ---- attention

absl::Status KvStore::ForEachPart(const Turn& turn, const Body& body) {
  if (layout_ == Layout::kHost) return StreamChunks(turn, body);
  const auto& own = views_.OwnWork(turn.stage);
  if (gradients_ && turn.chunk == 0) {
    for (const Resident& head : Of(turn.stage, own.fetch())) UPIPE_RETURN_IF_ERROR(Clear(head));
  }
  UPIPE_RETURN_IF_ERROR(layout_ == Layout::kPass ? Rotate(turn, body) : AttendShards(turn, body));
  const bool leaves = turn.chunk + 1 == views_.num_chunks() && layout_ != Layout::kKeep;
  return gradients_ && leaves ? MoveGradients(Of(turn.stage, own.release())) : absl::OkStatus();
}

absl::Status KvStore::AttendShards(const Turn& turn, const Body& body) {
  const int ring = views_.ring_ranks();
  const int64_t shard = views_.shard_tokens();
  for (int hop = 0; hop < ring; ++hop) {
    const int at = (views_.ring() - hop + ring) % ring;
    const auto rows = [&](KvTensor tensor) {
      const TensorView all = All(tensor);
      return ring == 1 || !all.present() ? all : all.Rows(at * shard, shard);
    };
    UPIPE_RETURN_IF_ERROR(
        body({.k = rows(KvTensor::kKeys),
              .v = rows(KvTensor::kValues),
              .dk = rows(KvTensor::kKeyGradients),
              .dv = rows(KvTensor::kValueGradients),
              .places = PlacesOfQueries(KvTensor::kKeys, turn.stage),
              .gradient_places = PlacesOfQueries(KvTensor::kKeyGradients, turn.stage),
              .runs = views_.tokens().ShardRuns(at, 0, shard)}));
  }
  return absl::OkStatus();
}

// After its last hop a head's K/V are needed at home only if a later turn attends with them.
bool KvStore::AnyoneNeedsHome(const Turn& turn) const {
  const auto& stage = views_.schedule().stages(turn.stage);
  return std::any_of(stage.ranks().begin(), stage.ranks().end(), [&](const auto& work) {
    return turn.chunk + 1 < views_.num_chunks() ? work.kv_heads_size() > 0
                                                : work.kv_heads_size() > work.release_size();
  });
}

absl::Status KvStore::Pass(absl::Span<const KvTensor> tensors, const std::vector<Resident>& heads) {
  const int ring = views_.ring_ranks();
  const int next = views_.RingPeer((views_.ring() + 1) % ring);
  const int previous = views_.RingPeer((views_.ring() + ring - 1) % ring);
  comm::AllToAllVParams exchange{.ring = true};
  for (KvTensor tensor : tensors) {
    for (const Resident& head : heads) {
      const TensorView content = At(tensor, head);
      const TensorView room =
          At(tensor, (IsGradient(tensor) ? gradient_ : kv_).room[head.stage_slot]);
      exchange.sends.push_back({next, content.data, content.num_bytes()});
      exchange.receives.push_back({previous, room.data, content.num_bytes()});
    }
  }
  Order(streams_.compute, streams_.ring);
  const Timed timed(streams_.ring, StageName::kExchange);
  return streams_.ring.comm().AllToAllV(exchange, streams_.ring.stream());
}

absl::Status KvStore::Rotate(const Turn& turn, const Body& body) {
  const int ring = views_.ring_ranks();
  const std::vector<Resident> active = Active(turn.stage);
  const auto& own = views_.OwnWork(turn.stage);
  std::vector<Resident> staying;
  for (int32_t head : own.kv_heads()) {
    const bool released =
        std::find(own.release().begin(), own.release().end(), head) != own.release().end();
    if (!released || turn.chunk + 1 < views_.num_chunks()) {
      staying.push_back(Of(turn.stage, head));
    }
  }
  for (int hop = 0; hop < ring; ++hop) {
    const int at = (views_.ring() - hop + ring) % ring;
    const bool last = hop == ring - 1;
    if (!last || AnyoneNeedsHome(turn)) {
      UPIPE_RETURN_IF_ERROR(Pass(kKeysAndValues, last ? staying : active));
    }
    UPIPE_RETURN_IF_ERROR(
        body({.k = All(KvTensor::kKeys),
              .v = All(KvTensor::kValues),
              .dk = All(KvTensor::kKeyGradients),
              .dv = All(KvTensor::kValueGradients),
              .places = PlacesOfQueries(KvTensor::kKeys, turn.stage),
              .gradient_places = PlacesOfQueries(KvTensor::kKeyGradients, turn.stage),
              .runs = views_.tokens().ShardRuns(at, 0, views_.shard_tokens())}));
    if (gradients_) UPIPE_RETURN_IF_ERROR(Pass(kGradients, active));
    for (const Resident& head : active) {
      std::swap(kv_.content[head.slot], kv_.room[head.stage_slot]);
      std::swap(gradient_.content[head.stage_slot], gradient_.room[head.stage_slot]);
    }
    const Waiting waiting(streams_.compute);
    Order(streams_.ring, streams_.compute);
  }
  return absl::OkStatus();
}

void KvStore::CopyChunk(KvTensor tensor, const Resident& head, int64_t chunk, int64_t buffer,
                        bool to_host) {
  const TensorView device = At(tensor, PlaceOf(tensor, head, buffer));
  const int64_t index = IsGradient(tensor) ? chunk * num_stage_slots_ + head.stage_slot
                                           : chunk * num_slots_ + head.slot;
  char* host =
      static_cast<char*>(host_[static_cast<int>(tensor)].data()) + index * device.num_bytes();
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

void KvStore::LoadChunk(const std::vector<Resident>& heads, int64_t chunk, int64_t buffer) {
  streams_.compute.streams().copy->Wait(chunk_used_[buffer]);
  const Timed offload(streams_.compute.On(*streams_.compute.streams().copy), StageName::kOffload);
  for (KvTensor tensor : kTensors) {
    if (IsGradient(tensor) && !gradients_) continue;
    for (const Resident& head : heads) {
      if (IsGradient(tensor) && !Touched(head, chunk)) continue;
      CopyChunk(tensor, head, chunk, buffer, /*to_host=*/false);
    }
  }
}

absl::Status KvStore::ClearUntouched(const std::vector<Resident>& heads, int64_t chunk,
                                     int64_t buffer) {
  for (const Resident& head : heads) {
    if (!gradients_ || Touched(head, chunk)) continue;
    Touched(head, chunk) = true;
    UPIPE_RETURN_IF_ERROR(Clear(head, buffer));
  }
  return absl::OkStatus();
}

// Heads of a chunk that no later turn attends to: released ones, after the last query chunk that
// sees it.
std::vector<KvStore::Resident> KvStore::Complete(const Turn& turn, int64_t chunk) const {
  if (last_seen_by_[chunk] != turn.chunk) return {};
  return Of(turn.stage, views_.OwnWork(turn.stage).release());
}

// The gradients of a part go back to the host; complete ones from where they have moved to, and
// their place on the host is the next head's.
void KvStore::StoreGradients(const Turn& turn, int64_t chunk, int64_t buffer) {
  std::vector<bool> complete(num_stage_slots_, false);
  for (const Resident& head : Complete(turn, chunk)) complete[head.stage_slot] = true;
  const Timed offload(streams_.compute.On(*streams_.compute.streams().copy), StageName::kOffload,
                      turn.stage);
  for (const Resident& head : Active(turn.stage)) {
    const bool moved = complete[head.stage_slot];
    for (KvTensor gradient : kGradients) {
      CopyChunk(moved ? DeadBeside(gradient) : gradient, head, chunk, buffer, /*to_host=*/true);
    }
    if (moved) Touched(head, chunk) = false;
  }
}

absl::Status KvStore::StreamChunks(const Turn& turn, const Body& body) {
  const RankContext& compute = streams_.compute;
  const RankContext copy = compute.On(*compute.streams().copy);
  const std::vector<int64_t>& chunks = visible_[turn.chunk];
  const std::vector<Resident> heads = Active(turn.stage);
  const int64_t tokens = views_.chunk_tokens();
  Order(compute, copy);
  LoadChunk(heads, chunks[0], 0);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t buffer = static_cast<int64_t>(i % 2), chunk = chunks[i];
    {
      const Waiting waiting(compute);
      Order(copy, compute);
    }
    // Before this part's gradients go back, so that the next is on its way meanwhile.
    if (i + 1 < chunks.size()) LoadChunk(heads, chunks[i + 1], 1 - buffer);
    UPIPE_RETURN_IF_ERROR(ClearUntouched(heads, chunk, buffer));
    UPIPE_RETURN_IF_ERROR(body(
        {.k = All(KvTensor::kKeys),
         .v = All(KvTensor::kValues),
         .dk = All(KvTensor::kKeyGradients),
         .dv = All(KvTensor::kValueGradients),
         .places = PlacesOfQueries(KvTensor::kKeys, turn.stage, buffer),
         .gradient_places = PlacesOfQueries(KvTensor::kKeyGradients, turn.stage, buffer),
         .runs = views_.tokens().ShardRuns(views_.ring(), chunk * tokens, (chunk + 1) * tokens)}));
    if (gradients_) UPIPE_RETURN_IF_ERROR(MoveGradients(Complete(turn, chunk), buffer));
    chunk_used_[buffer] = compute.stream().Record();
    if (!gradients_) continue;
    copy.stream().Wait(chunk_used_[buffer]);
    StoreGradients(turn, chunk, buffer);
  }
  const Waiting waiting(compute);
  Order(copy, compute);
  return absl::OkStatus();
}

// ---- release

absl::Status KvStore::BeginRelease(int stage, KvTensor gradient) {
  return layout_ == Layout::kKeep ? ReduceShards(stage, gradient) : absl::OkStatus();
}

// Where the part of ring rank `ring_rank` for the own shard arrives, [M, 1, D] fp32: in the K and V
// shards of the slot, which are dead. Others' parts only, one after the other.
TensorView KvStore::Contribution(const Resident& head, int ring_rank) const {
  const int64_t index = ring_rank < views_.ring() ? ring_rank : ring_rank - 1;
  const int64_t block_bytes = views_.shard_tokens() * views_.head_dim() * SizeOf(kF32);
  const int64_t in_keys = At(KvTensor::kKeys, head).num_bytes() / block_bytes;
  const KvTensor home = index < in_keys ? KvTensor::kKeys : KvTensor::kValues;
  void* data = static_cast<char*>(At(home, head).data) + index % in_keys * block_bytes;
  return HeadBlocks(data, kF32, views_.shard_tokens(), 1, views_.head_dim());
}

// The sum over the ring, [M, 1, D] fp32, once ReduceShards has run.
TensorView KvStore::ReducedShard(KvTensor gradient, const Resident& head) const {
  if (views_.ring() > 0) return Contribution(head, 0);
  return At(gradient, head).Rows(0, views_.shard_tokens());
}

// Room for its rounded form, [M, 1, D]: what has been added and is dead.
TensorView KvStore::NarrowShard(KvTensor gradient, const Resident& head) const {
  const int64_t shard = views_.shard_tokens();
  void* data =
      views_.ring() > 0 ? At(gradient, head).At(views_.ring() * shard) : Contribution(head, 1).data;
  return HeadBlocks(data, views_.stored(), shard, 1, views_.head_dim());
}

absl::Status KvStore::ReduceShards(int stage, KvTensor gradient) {
  const int64_t shard = views_.shard_tokens();
  const std::vector<Resident> heads = Of(stage, views_.OwnWork(stage).release());
  comm::AllToAllVParams exchange{.ring = true};
  for (const Resident& head : heads) {
    for (int peer = 0; peer < views_.ring_ranks(); ++peer) {
      if (peer == views_.ring()) continue;
      const TensorView theirs = At(gradient, head).Rows(peer * shard, shard);
      const TensorView ours = Contribution(head, peer);
      exchange.sends.push_back({views_.RingPeer(peer), theirs.data, theirs.num_bytes()});
      exchange.receives.push_back({views_.RingPeer(peer), ours.data, ours.num_bytes()});
    }
  }
  UPIPE_RETURN_IF_ERROR(streams_.side.comm().AllToAllV(exchange, streams_.side.stream()));
  for (const Resident& head : heads) {
    const TensorView sum = ReducedShard(gradient, head);
    for (int peer = 1; peer < views_.ring_ranks(); ++peer) {  // ascending, from rank 0's part on
      const TensorView part = peer == views_.ring() ? At(gradient, head).Rows(peer * shard, shard)
                                                    : Contribution(head, peer);
      UPIPE_RETURN_IF_ERROR(Add(streams_.side, part, sum));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorView> KvStore::Released(KvTensor gradient, const Turn& turn, int32_t kv_head) {
  const RankContext& side = streams_.side;
  const Resident head = Of(turn.stage, kv_head);
  const int64_t tokens = views_.chunk_tokens(), first = turn.chunk * tokens;
  const KvTensor moved_to = DeadBeside(gradient);
  switch (layout_) {
    case Layout::kKeep: {
      const TensorView sum = ReducedShard(gradient, head).Rows(first, tokens);
      if (views_.stored() == kF32) return sum;
      const TensorView narrow = NarrowShard(gradient, head).Rows(first, tokens);
      UPIPE_RETURN_IF_ERROR(side.Run(kernels::StridedCopyParams{.src = sum, .dst = narrow}));
      return narrow;
    }
    case Layout::kHost: {
      const RankContext copy = side.On(*side.streams().copy);
      Order(side, copy);
      {
        const Timed offload(copy, StageName::kOffload, turn.stage);
        CopyChunk(moved_to, head, turn.chunk, LandingBuffer(turn.chunk), /*to_host=*/false);
      }
      const Waiting waiting(side);
      Order(copy, side);
      return At(moved_to, PlaceOf(moved_to, head, LandingBuffer(turn.chunk)));
    }
    default:
      return At(moved_to, head).Rows(first, tokens);
  }
}

}  // namespace upipe::attention
