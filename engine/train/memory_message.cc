#include "engine/train/memory_message.h"

namespace upipe::train {

v1::MemoryUsage ToMessage(const kernels::MemoryStats& stats) {
  v1::MemoryUsage usage;
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
    auto* bytes = usage.add_tags();
    bytes->set_tag(kernels::kMemoryTagNames[tag]);
    bytes->set_bytes(stats.current_bytes[tag]);
    bytes->set_peak_bytes(stats.peak_bytes[tag]);
    bytes->set_at_peak_bytes(stats.at_peak_bytes[tag]);
  }
  usage.set_current_bytes(stats.current_total_bytes);
  usage.set_peak_bytes(stats.peak_total_bytes);
  usage.set_attention_peak_bytes(stats.attention_peak_bytes);
  usage.set_arena_bytes(stats.arena_high_water_bytes);
  usage.set_peak_moment(stats.peak_moment);
  return usage;
}

}  // namespace upipe::train
