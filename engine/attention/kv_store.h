// Keys and values that a rank attends with, and their gradients: where they lie from fetch to
// release, and in which parts a turn meets them. The four ways of the schedule space:
//   whole   the own shard on the device: one part (R = 1)
//   pass    R shards, one at a time: the content goes round the ring, into a second place
//   keep    R shards gathered once at the fetch, gradients reduced once at the release
//   host    chunks wait in host memory, two at a time on the device (fpdt)
//
// A released head's gradients move, in the storage type, into the place of its keys and values,
// which are dead, at the end of its last turn. They travel home from there while the next stage
// uses their own place.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "engine/attention/layer_views.h"

namespace upipe::attention {

enum class KvTensor : uint8_t { kKeys, kValues, kKeyGradients, kValueGradients };
inline constexpr int kNumKvTensors = 4;

// Where the layer's work is enqueued.
struct LayerStreams {
  engine::RankContext compute;  // attention
  engine::RankContext side;     // projections and exchanges; the compute stream without overlap
  engine::RankContext ring;     // K/V round the ring; the compute stream without overlap
};

// `later` waits for what `earlier` was given so far; nothing when they are the same stream.
void Order(const engine::RankContext& earlier, const engine::RankContext& later);

class KvStore {
 public:
  struct Params {
    const LayerStreams& streams;
    const LayerViews& views;
    const engine::MemoryPolicy& policy;
    const kernels::AttentionMask& mask;
    bool gradients = false;  // also dk, dv
  };
  static absl::StatusOr<KvStore> Create(const Params& params);

  // The fetch of a turn's stage, on the side stream. For every chunk: the whole heads land here,
  // [M/n, 1, D] each, then Landed; after the last chunk, Fetched.
  kernels::TensorView Landing(KvTensor tensor, const Turn& turn, int32_t kv_head) const;
  absl::Status Landed(const Turn& turn);
  absl::Status Fetched(int stage);

  // Keys that a turn attends to at once.
  struct Part {
    kernels::TensorView k, v, dk, dv;        // [tokens, places, D]
    std::vector<int32_t> places;             // in k and v, of each own query head of the stage
    std::vector<int32_t> gradient_places;    // in dk and dv
    std::vector<kernels::PositionRun> runs;  // of the tokens
  };
  using Body = std::function<absl::Status(const Part& part)>;
  // Calls body for every part, on the compute stream, in an order that depends on nothing else.
  absl::Status ForEachPart(const Turn& turn, const Body& body);
  // True when a turn meets its keys in more than one part, so that outputs are merged.
  bool has_parts() const { return layout_ != Layout::kWhole && num_parts_ > 1; }

  // The release of a stage, on the side stream: kKeyGradients first, then kValueGradients. Between
  // BeginRelease and the next one, Released gives the summed gradient of a head, [M/n, 1, D] of the
  // storage type, good until the side stream passes the next call of Released for another chunk.
  absl::Status BeginRelease(int stage, KvTensor gradient);
  absl::StatusOr<kernels::TensorView> Released(KvTensor gradient, const Turn& turn,
                                               int32_t kv_head);

 private:
  enum class Layout : uint8_t { kWhole, kPass, kKeep, kHost };

  // A resident K/V head: its slot of the schedule, and its slot in what only the stage in work has
  // room for (parallel::StageSlots).
  struct Resident {
    int slot = 0;
    int stage_slot = 0;
  };
  // Where heads lie among the places of keys and values, or of gradients, but on the host. Keys
  // and values: content by slot; gradients: by stage slot. Where the content of the rank before
  // comes to: by stage slot.
  struct Places {
    std::vector<int64_t> content, room;
  };

  explicit KvStore(const Params& params);
  void CountPlaces();
  absl::Status Allocate();
  kernels::DType TypeOf(KvTensor tensor) const;
  // Every place of a tensor, [rows_, places, D], and one of them, [rows_, 1, D].
  kernels::TensorView All(KvTensor tensor) const;
  kernels::TensorView At(KvTensor tensor, int64_t place) const;
  kernels::TensorView At(KvTensor tensor, const Resident& head) const {
    return At(tensor, PlaceOf(tensor, head));
  }
  // `buffer` of the chunks on the device; the others have one.
  int64_t PlaceOf(KvTensor tensor, const Resident& head, int64_t buffer = 0) const;
  std::vector<int32_t> PlacesOfQueries(KvTensor tensor, int stage, int64_t buffer = 0) const;
  int64_t LandingBuffer(int64_t chunk) const { return lands_apart_ ? 2 : chunk % 2; }
  Resident Of(int stage, int32_t kv_head) const;
  using HeadList = google::protobuf::RepeatedField<int32_t>;
  std::vector<Resident> Of(int stage, const HeadList& kv_heads) const;
  std::vector<Resident> Active(int stage) const;

  absl::Status Clear(const Resident& head, int64_t buffer = 0);
  absl::Status MoveGradients(const std::vector<Resident>& heads, int64_t buffer = 0);

  absl::Status GatherShards(int stage);
  absl::Status ReduceShards(int stage, KvTensor gradient);
  kernels::TensorView Contribution(const Resident& head, int ring_rank) const;
  kernels::TensorView ReducedShard(KvTensor gradient, const Resident& head) const;
  kernels::TensorView NarrowShard(KvTensor gradient, const Resident& head) const;

  absl::Status AttendShards(const Turn& turn, const Body& body);
  absl::Status Rotate(const Turn& turn, const Body& body);
  bool AnyoneNeedsHome(const Turn& turn) const;
  absl::Status Pass(absl::Span<const KvTensor> tensors, const std::vector<Resident>& heads);

  absl::Status StreamChunks(const Turn& turn, const Body& body);
  std::vector<int64_t> VisibleChunks(int64_t query_chunk) const;
  std::vector<Resident> Complete(const Turn& turn, int64_t chunk) const;
  void CopyChunk(KvTensor tensor, const Resident& head, int64_t chunk, int64_t buffer,
                 bool to_host);
  void LoadChunk(const std::vector<Resident>& heads, int64_t chunk, int64_t buffer);
  absl::Status ClearUntouched(const std::vector<Resident>& heads, int64_t chunk, int64_t buffer);
  void StoreGradients(const Turn& turn, int64_t chunk, int64_t buffer);
  std::vector<bool>::reference Touched(const Resident& head, int64_t chunk) {
    return touched_[chunk * num_stage_slots_ + head.stage_slot];
  }

  const LayerStreams& streams_;
  const LayerViews& views_;
  const kernels::AttentionMask& mask_;
  const bool gradients_;
  Layout layout_ = Layout::kWhole;
  int num_parts_ = 1;
  int64_t num_slots_ = 0;
  int64_t num_stage_slots_ = 0;
  std::vector<std::vector<int32_t>> stage_slots_;  // [stage][of its K/V heads]
  int64_t num_kv_places_ = 0;
  int64_t num_gradient_places_ = 0;
  int64_t rows_ = 0;  // of a place
  std::array<kernels::Buffer, kNumKvTensors> device_, host_;
  Places kv_, gradient_;

  // Host.
  bool lands_apart_ = false;  // in a third buffer: the stage before attends meanwhile
  std::vector<std::vector<int64_t>> visible_;  // [query chunk]: the chunks it sees
  std::vector<int64_t> last_seen_by_;          // [chunk]: a query chunk
  std::vector<bool> touched_;                  // [chunk, stage slot]: the gradients hold something
  std::array<kernels::Event, 2> chunk_used_;   // the last part in a buffer has been attended to
};

}  // namespace upipe::attention
