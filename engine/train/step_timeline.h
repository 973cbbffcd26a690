// Timelines of some steps of a rank, as StepTimeline carries them: slices of the clock and what the
// pools held meanwhile. Their memory is taken once, too.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "engine/step_clock.h"
#include "kernels/api/device.h"
#include "upipe/v1/timeline.pb.h"

namespace upipe::train {

// The first step is told, and then at most one in so long.
inline constexpr absl::Duration kTimelineEvery = absl::Seconds(30);

// What the pools of a device hold by category, from change to change, at the host's time; timelines
// tell it at the compute lane's. In less and less detail where there are more changes than room: of
// each interval, each category's largest and its last.
class MemorySamples {
 public:
  struct Sample {
    int64_t nanos = 0;  // of std::chrono::steady_clock
    kernels::MemoryTag tag = kernels::MemoryTag::kWeights;
    bool host = false;
    int64_t bytes = 0;
  };
  static constexpr int kCapacity = 8192;

  // Watches the device's allocators, which must outlive it; they have no other observer.
  explicit MemorySamples(kernels::Device& device, int capacity = kCapacity);
  ~MemorySamples();

  // From here on until End; begins with what is held now.
  void Begin();
  void End() { recording_ = false; }
  absl::Span<const Sample> samples() const { return samples_; }
  // `bytes` more of a category, or less.
  void Add(int64_t nanos, kernels::MemoryTag tag, bool host, int64_t bytes);

 private:
  class Pool;
  static constexpr int kNumSeries = 2 * kernels::kNumMemoryTags;
  static int SeriesOf(const Sample& sample) {
    return static_cast<int>(sample.tag) + (sample.host ? kernels::kNumMemoryTags : 0);
  }
  void Thin();

  kernels::Device& device_;
  const int capacity_;
  bool recording_ = false;
  std::array<int64_t, kNumSeries> held_ = {};
  int64_t interval_nanos_ = 0;  // of the last thinning; 0 = none yet
  std::vector<Sample> samples_;
  std::unique_ptr<Pool> device_pool_, host_pool_;
};

// Decides which steps have a timeline, and makes it. Lives as long as the rank's steps.
class StepTimelines {
 public:
  struct Params {
    int rank = 0;
    engine::StepClock& clock;
    kernels::Device& device;
    // Called between steps; null: no step has a timeline.
    std::function<void(const v1::StepTimeline&)> tell = {};
    absl::Duration every = kTimelineEvery;
  };
  explicit StepTimelines(const Params& params);

  // Begins a step of the clock.
  void BeginStep();
  // Ends it when the streams have: they may still be at work when the host has its results. Their
  // first error, if any.
  absl::Status EndStep();
  // Tells the timeline of the step that ended, if it has one.
  void Tell(int64_t step);

 private:
  const Params params_;
  std::optional<MemorySamples> memory_;
  bool kept_ = false;
  int64_t begin_nanos_ = 0;  // of the step
  int64_t begin_unix_micros_ = 0;
  std::optional<int64_t> last_kept_nanos_;
  v1::StepTimeline message_;  // keeps its memory from one to the next
};

}  // namespace upipe::train
