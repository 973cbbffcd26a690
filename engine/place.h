// Where tensors live while a step runs: on the device, or in the pool of pinned host memory.
#pragma once

#include <cstdint>

#include "upipe/v1/job.pb.h"

namespace upipe::engine {

enum class Place : uint8_t { kDevice, kHost };

// The memory policy of a job (DESIGN: Memory). Every field is a point between memory and time; none
// changes a result by more than where sums are rounded.
struct MemoryPolicy {
  enum class AttentionOutput : uint8_t { kRecompute, kDevice, kHost };

  AttentionOutput attention_output = AttentionOutput::kRecompute;
  Place layer_inputs = Place::kDevice;
  int checkpoint_stride = 1;
  Place hidden_stream = Place::kDevice;  // kHost only with layer_inputs = kHost
  Place stage_kv = Place::kDevice;
  bool overlap = false;
  bool ring_keeps_kv = false;
  Place optimizer = Place::kDevice;

  // The spec must have passed ValidateJobSpec and WithDefaults.
  static MemoryPolicy From(const v1::MemorySpec& spec);
};

}  // namespace upipe::engine
