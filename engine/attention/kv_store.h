// Keys and values that a rank attends with, and their gradients: where they lie from fetch to
// release, and in which parts a turn meets them. The four ways of the schedule space:
//   whole   the own shard on the device: one part (R = 1)
//   pass    R shards, one at a time: two places per slot, the content goes round the ring
//   keep    R shards gathered once at the fetch, gradients reduced once at the release
//   host    chunks wait in host memory, two at a time on the device (fpdt)
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

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

  // The fetch of a stage, on the side stream. For every chunk: the whole heads land here, [M/n, 1,
  // D] each, then Landed; after the last chunk, Fetched.
  void BeginFetch(int stage);
  kernels::TensorView Landing(KvTensor tensor, int slot, int64_t chunk) const;
  absl::Status Landed(int stage, int64_t chunk);
  absl::Status Fetched(int stage);

  // Keys that a turn attends to at once.
  struct Part {
    kernels::TensorView k, v, dk, dv;        // [tokens, places, D]
    std::vector<int32_t> places;             // of each own query head of the stage
    std::vector<kernels::PositionRun> runs;  // of the tokens
  };
  using Body = std::function<absl::Status(const Part& part)>;
  // Calls body for every part, on the compute stream, in an order that depends on nothing else.
  absl::Status ForEachPart(const Turn& turn, const Body& body);
  // True when a turn meets its keys in more than one part, so that outputs are merged.
  bool has_parts() const { return layout_ != Layout::kWhole && num_parts_ > 1; }

  // The release of a stage, on the side stream: kKeyGradients first, then kValueGradients. Between
  // BeginRelease and the next one, Released gives the summed gradient of a slot, [M/n, 1, D] of the
  // storage type, good until the side stream passes the next call of Released for another chunk.
  absl::Status BeginRelease(int stage, KvTensor gradient);
  absl::StatusOr<kernels::TensorView> Released(KvTensor gradient, int slot, int64_t chunk);

 private:
  enum class Layout : uint8_t { kWhole, kPass, kKeep, kHost };

  explicit KvStore(const Params& params);
  absl::Status Allocate();
  kernels::DType TypeOf(KvTensor tensor) const;
  // Every place of a tensor, [rows_, places, D], and one of them, [rows_, 1, D].
  kernels::TensorView All(KvTensor tensor) const;
  kernels::TensorView At(KvTensor tensor, int64_t place) const;
  int64_t PlaceOf(int slot) const;  // whole, pass, keep
  int64_t HostPlace(int64_t buffer, int slot) const { return buffer * num_slots_ + slot; }
  int64_t LandingBuffer(int64_t chunk) const { return overlap_ ? 2 : chunk % 2; }
  std::vector<int32_t> PlacesOfQueries(int stage, int64_t first_place) const;
  std::vector<int> ActiveSlots(int stage) const;
  std::vector<int> SlotsOf(int stage,
                           const google::protobuf::RepeatedField<int32_t>& kv_heads) const;

  absl::Status GatherShards(int stage);
  absl::Status ReduceShards(int stage, KvTensor gradient);
  kernels::TensorView Contribution(int slot, int ring_rank) const;
  kernels::TensorView ReducedShard(KvTensor gradient, int slot) const;
  kernels::TensorView NarrowShard(KvTensor gradient, int slot) const;

  absl::Status Rotate(const Turn& turn, const Body& body);
  bool AnyoneNeedsHome(const Turn& turn) const;
  absl::Status Pass(std::vector<KvTensor> tensors, const std::vector<int>& slots);

  absl::Status StreamChunks(const Turn& turn, const Body& body);
  std::vector<int64_t> VisibleChunks(int64_t query_chunk) const;
  void CopySlot(KvTensor tensor, int slot, int64_t chunk, int64_t buffer, bool to_host);
  void LoadChunk(const std::vector<int>& slots, int64_t chunk, int64_t buffer);
  absl::Status ClearUntouched(const std::vector<int>& slots, int64_t chunk, int64_t buffer);

  const LayerStreams& streams_;
  const LayerViews& views_;
  const kernels::AttentionMask& mask_;
  const bool overlap_;
  const bool gradients_;
  Layout layout_ = Layout::kWhole;
  int num_parts_ = 1;
  int64_t num_slots_ = 0;
  int64_t num_places_ = 0;
  int64_t rows_ = 0;  // of a place
  std::array<kernels::Buffer, kNumKvTensors> device_, host_;
  std::vector<bool> turned_;   // pass: the slot's content lies in its second place
  std::vector<bool> touched_;  // host: [chunk, slot] the gradients hold something
  std::array<kernels::Event, 2>
      chunk_used_;  // host: the last part in a buffer has been attended to
};

}  // namespace upipe::attention
