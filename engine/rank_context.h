// What every part of a rank's training program is handed: the device, its streams, the
// communicator, the mesh, the storage type, and where the step is. Borrowed, never owned. Not
// thread-safe: one host thread drives a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/position_page.h"
#include "engine/comm/communicator.h"
#include "engine/parallel/mesh.h"
#include "engine/place.h"
#include "kernels/api/device.h"

namespace upipe::engine {

// The streams of one rank. Made before, and gone after, everything that runs on them.
struct RankStreams {
  std::unique_ptr<kernels::Stream>
      compute;                              // all arithmetic, but for what the side stream overlaps
  std::unique_ptr<kernels::Stream> side;    // a stage's projections and exchanges beside attention
  std::unique_ptr<kernels::Stream> ring;    // K/V on their way round the ring
  std::unique_ptr<kernels::Stream> copy;    // to and from host memory
  std::unique_ptr<kernels::Stream> host;    // ops over host memory
  std::unique_ptr<kernels::Stream> gather;  // weights on their way from the ranks that hold them

  static RankStreams Create(kernels::Device& device, int rank);
};

// Where a step is; -1 = in no layer, in no stage.
struct Moment {
  StepPass pass = StepPass::kIdle;
  int layer = -1;
  int stage = -1;
  bool operator==(const Moment&) const = default;
};
// "backward layer 3 stage 1".
std::string NameOf(const Moment& moment);

// Is told of every moment as it begins, in host order: what cuts a dry run into a timeline.
class MomentObserver {
 public:
  virtual ~MomentObserver() = default;
  virtual void Begin(const Moment& moment) = 0;
};

class StepClock;

struct RankContextParams {
  kernels::Device& device;
  const RankStreams& streams;
  comm::Communicator& comm;
  PositionPage* position = nullptr;
  MomentObserver* observer = nullptr;
  StepClock* clock = nullptr;
  // fp32 or bf16: gathered weights, layer inputs, queries, keys, values, attention outputs and
  // their gradients, MLP tiles, and all that ranks exchange of these. Everything else is fp32:
  // master weights, gradients of weights, moments, logits, log-sum-exps, sums.
  kernels::DType storage;
  parallel::Mesh mesh;  // of comm.size() ranks
};

class RankContext {
 public:
  explicit RankContext(const RankContextParams& params);

  kernels::Device& device() const { return params_.device; }
  // Where this context's ops are enqueued: the compute stream, unless it was made by On.
  kernels::Stream& stream() const { return *stream_; }
  const RankStreams& streams() const { return params_.streams; }
  // The same context, enqueueing on another stream of the device.
  RankContext On(kernels::Stream& stream) const;
  comm::Communicator& comm() const { return params_.comm; }
  // Null where nobody measures.
  StepClock* clock() const { return params_.clock; }
  kernels::DType storage() const { return params_.storage; }
  const parallel::Mesh& mesh() const { return params_.mesh; }
  const parallel::Coordinates& at() const { return at_; }
  int rank() const { return params_.comm.rank(); }
  int num_ranks() const { return params_.comm.size(); }

  // Device memory for use on this context's stream, freed in host order when the Buffer goes.
  absl::StatusOr<kernels::Buffer> Allocate(kernels::MemoryTag tag, int64_t bytes) const {
    return params_.device.allocator().Allocate(tag, bytes, *stream_);
  }
  // Elements of the storage type.
  absl::StatusOr<kernels::Buffer> AllocateStored(kernels::MemoryTag tag, int64_t count) const {
    return Allocate(tag, count * SizeOf(params_.storage));
  }
  // fp32 elements.
  absl::StatusOr<kernels::Buffer> AllocateFloats(kernels::MemoryTag tag, int64_t count) const {
    return Allocate(tag, count * static_cast<int64_t>(sizeof(float)));
  }
  // Host memory, for use by the copy stream.
  absl::StatusOr<kernels::Buffer> AllocateHost(kernels::MemoryTag tag, int64_t bytes) const {
    return params_.device.host_allocator().Allocate(tag, bytes, *params_.streams.copy);
  }
  // Enqueues one op on this context's stream with the scratch it asks for.
  absl::Status Run(const kernels::OpParams& params) const;
  // Enqueues one op over host memory on the host stream, with scratch of the host pool.
  absl::Status RunOnHost(const kernels::OpParams& params) const;
  // Fills an fp32 or other tensor with a constant.
  absl::Status Fill(const kernels::TensorView& dst, double value) const {
    return Run(kernels::FillParams{.dst = dst, .value = value});
  }
  // Waits until the rank's streams are idle and settles both pools, so that every step gets the
  // addresses, and needs the arena, of the first. The first error of a stream, if any.
  absl::Status Settle() const;
  // Says where the step is: kept with the allocator's peak now, in the position page when the
  // stream gets here.
  void Mark(int64_t step, StepPass pass, int layer, int stage) const;

 private:
  RankContextParams params_;
  parallel::Coordinates at_;
  kernels::Stream* stream_;
};

}  // namespace upipe::engine
