#include "engine/place.h"

namespace upipe::engine {
namespace {

Place PlaceOf(v1::Place place) { return place == v1::PLACE_HOST ? Place::kHost : Place::kDevice; }

MemoryPolicy::AttentionOutput OutputOf(v1::AttentionOutput output) {
  switch (output) {
    case v1::ATTENTION_OUTPUT_DEVICE:
      return MemoryPolicy::AttentionOutput::kDevice;
    case v1::ATTENTION_OUTPUT_HOST:
      return MemoryPolicy::AttentionOutput::kHost;
    default:
      return MemoryPolicy::AttentionOutput::kRecompute;
  }
}

}  // namespace

MemoryPolicy MemoryPolicy::From(const v1::MemorySpec& spec) {
  return {.attention_output = OutputOf(spec.attention_output()),
          .layer_inputs = PlaceOf(spec.layer_inputs()),
          .checkpoint_stride = spec.checkpoint_stride(),
          .hidden_stream = PlaceOf(spec.hidden_stream()),
          .stage_kv = PlaceOf(spec.stage_kv()),
          .overlap = spec.overlap(),
          .ring_keeps_kv = spec.ring_kv() == v1::RING_KV_KEEP,
          .optimizer = PlaceOf(spec.optimizer())};
}

}  // namespace upipe::engine
