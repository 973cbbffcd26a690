// What every part of a rank's training program is handed: the device, its compute stream, the
// communicator, the storage type, and where the step is. Borrowed, never owned. Not thread-safe:
// one host thread drives a rank.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/position_page.h"
#include "engine/comm/communicator.h"
#include "kernels/api/device.h"

namespace upipe::engine {

class RankContext {
 public:
  RankContext(kernels::Device& device, kernels::Stream& stream, comm::Communicator& comm,
              PositionPage* position, kernels::DType storage)
      : device_(device), stream_(stream), comm_(comm), position_(position), storage_(storage) {}

  kernels::Device& device() const { return device_; }
  kernels::Stream& stream() const { return stream_; }
  comm::Communicator& comm() const { return comm_; }
  // fp32 or bf16: gathered weights, layer inputs, queries, keys, values, attention outputs and
  // their gradients, MLP tiles, and all that ranks exchange of these. Everything else is fp32:
  // master weights, gradients of weights, moments, logits, log-sum-exps, sums.
  kernels::DType storage() const { return storage_; }
  int rank() const { return comm_.rank(); }
  int num_ranks() const { return comm_.size(); }

  // Device memory for use on the compute stream, freed in host order when the Buffer goes.
  absl::StatusOr<kernels::Buffer> Allocate(kernels::MemoryTag tag, int64_t bytes) const {
    return device_.allocator().Allocate(tag, bytes, stream_);
  }
  // Elements of the storage type.
  absl::StatusOr<kernels::Buffer> AllocateStored(kernels::MemoryTag tag, int64_t count) const {
    return Allocate(tag, count * SizeOf(storage_));
  }
  // fp32 elements.
  absl::StatusOr<kernels::Buffer> AllocateFloats(kernels::MemoryTag tag, int64_t count) const {
    return Allocate(tag, count * static_cast<int64_t>(sizeof(float)));
  }
  // Enqueues one op on the compute stream with the scratch it asks for.
  absl::Status Run(const kernels::OpParams& params) const;
  // Fills an fp32 or other tensor with a constant.
  absl::Status Fill(const kernels::TensorView& dst, double value) const {
    return Run(kernels::FillParams{.dst = dst, .value = value});
  }
  // Says where the step is: kept with the allocator's peak now, in the position page when the
  // stream gets here.
  void Mark(int64_t step, StepPass pass, int layer, int stage) const;

 private:
  kernels::Device& device_;
  kernels::Stream& stream_;
  comm::Communicator& comm_;
  PositionPage* position_;
  kernels::DType storage_;
};

}  // namespace upipe::engine
