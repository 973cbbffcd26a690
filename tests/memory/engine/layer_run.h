// One layer of a Point on the dry device, pass by pass: what each took of the device and of the
// host. The engine's own attention and MLP code; weights are addresses nobody reads.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/api/allocator.h"
#include "kernels/dry/dry_device.h"
#include "tests/memory/engine/layer_formula.h"

namespace upipe::testing {

struct PassMemory {
  kernels::MemoryStats device, host;
};

struct LayerMemory {
  PassMemory forward, mlp_backward, attention_backward;
  kernels::DryCounts counts;  // of all three
  int64_t bytes_sent = 0;
};

// Ops of the CPU backend's attention kernels, or of cuDNN's as research has them, at no scratch but
// attention's.
std::unique_ptr<kernels::OpTable> OwnAttentionKernel();
std::unique_ptr<kernels::OpTable> CudnnAttentionKernel();

// As the engine runs it: the stream becomes the layer's output in place; backward starts from the
// layer's input where the policy keeps it, and the stream carries the gradient.
absl::StatusOr<LayerMemory> RunLayerDry(const Point& point, int rank,
                                        std::unique_ptr<kernels::OpTable> kernel);

}  // namespace upipe::testing
