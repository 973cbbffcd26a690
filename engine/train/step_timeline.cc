#include "engine/train/step_timeline.h"

#include <algorithm>
#include <utility>

#include "common/status.h"

namespace upipe::train {

using engine::Lane;
using engine::Slice;
using kernels::MemoryTag;

// The two lists of lanes are one.
static_assert(v1::StepTimeline::Lane_ARRAYSIZE == engine::kNumLanes);
static_assert(v1::StepTimeline::LANE_SIDE == static_cast<int>(Lane::kSide));
static_assert(v1::StepTimeline::LANE_GATHER == static_cast<int>(Lane::kGather));

class MemorySamples::Pool final : public kernels::AllocatorObserver {
 public:
  Pool(MemorySamples& samples, bool host) : samples_(samples), host_(host) {}
  void OnAllocate(MemoryTag tag, int64_t bytes, int64_t, const kernels::Stream&) override {
    samples_.Add(kernels::SteadyNanos(), tag, host_, bytes);
  }
  void OnRelease(MemoryTag tag, int64_t bytes, int64_t) override {
    samples_.Add(kernels::SteadyNanos(), tag, host_, -bytes);
  }
  void OnSettle() override {}

 private:
  MemorySamples& samples_;
  const bool host_;
};

MemorySamples::MemorySamples(kernels::Device& device, int capacity)
    : device_(device),
      capacity_(capacity),
      device_pool_(std::make_unique<Pool>(*this, /*host=*/false)),
      host_pool_(std::make_unique<Pool>(*this, /*host=*/true)) {
  samples_.reserve(capacity);
  device_.allocator().set_observer(device_pool_.get());
  device_.host_allocator().set_observer(host_pool_.get());
}

MemorySamples::~MemorySamples() {
  device_.allocator().set_observer(nullptr);
  device_.host_allocator().set_observer(nullptr);
}

void MemorySamples::Begin() {
  recording_ = true;
  samples_.clear();
  interval_nanos_ = 0;
  held_ = {};
  const int64_t now = kernels::SteadyNanos();
  for (const bool host : {false, true}) {
    const kernels::MemoryStats stats =
        (host ? device_.host_allocator() : device_.allocator()).stats();
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      if (stats.current_bytes[tag] == 0) continue;
      Add(now, static_cast<MemoryTag>(tag), host, stats.current_bytes[tag]);
    }
  }
}

void MemorySamples::Add(int64_t nanos, MemoryTag tag, bool host, int64_t bytes) {
  if (!recording_) return;
  Sample sample{.nanos = nanos, .tag = tag, .host = host};
  sample.bytes = held_[SeriesOf(sample)] += bytes;
  while (static_cast<int>(samples_.size()) >= capacity_) Thin();
  samples_.push_back(sample);
}

// Joins the samples of a category within an interval to two: its largest, and its last.
void MemorySamples::Thin() {
  struct Joined {
    int64_t interval = -1;
    Sample* largest = nullptr;
    Sample* last = nullptr;  // null while there is one
  };
  const int64_t begin = samples_.front().nanos;
  // Room for two samples of eight categories.
  const int64_t least = (samples_.back().nanos - begin) / (capacity_ / 16 + 1) + 1;
  interval_nanos_ = std::max(2 * interval_nanos_, least);
  std::array<Joined, kNumSeries> series = {};
  Sample* end = samples_.data();
  for (const Sample& sample : samples_) {
    Joined& joined = series[SeriesOf(sample)];
    const int64_t interval = (sample.nanos - begin) / interval_nanos_;
    if (joined.interval != interval) {
      *end = sample;
      joined = {.interval = interval, .largest = end++};
    } else if (joined.last == nullptr) {
      *end = sample;
      joined.last = end++;
    } else {
      if (joined.last->bytes > joined.largest->bytes) *joined.largest = *joined.last;
      *joined.last = sample;
    }
  }
  samples_.resize(end - samples_.data());
  std::sort(samples_.begin(), samples_.end(),
            [](const Sample& a, const Sample& b) { return a.nanos < b.nanos; });
}

StepTimelines::StepTimelines(const Params& params) : params_(params) {
  if (!params_.tell) return;
  memory_.emplace(params_.device);
  // What Clear keeps.
  const engine::StepClock::Capacity most;
  for (int i = 0; i < most.slices; ++i) message_.add_slices();
  for (int i = 0; i < MemorySamples::kCapacity; ++i) message_.add_memory();
  message_.Clear();
}

void StepTimelines::BeginStep() {
  begin_nanos_ = kernels::SteadyNanos();
  begin_unix_micros_ = absl::ToUnixMicros(absl::Now());
  kept_ = memory_ && (!last_kept_nanos_ ||
                      begin_nanos_ - *last_kept_nanos_ >= absl::ToInt64Nanoseconds(params_.every));
  params_.clock.BeginStep(/*keep_slices=*/kept_);
  if (!kept_) return;
  last_kept_nanos_ = begin_nanos_;
  memory_->Begin();
}

absl::Status StepTimelines::EndStep() {
  if (kept_) memory_->End();
  return params_.clock.EndStep();
}

void StepTimelines::Tell(int64_t step) {
  if (!kept_) return;
  v1::StepTimeline& message = message_;
  message.Clear();
  message.set_step(step);
  message.set_rank(params_.rank);
  message.set_start_unix_micros(begin_unix_micros_);
  for (int name = 0; name < engine::kNumStageNames; ++name) {
    message.add_stages(NameOf(static_cast<engine::StageName>(name)));
  }
  for (const char* tag : kernels::kMemoryTagNames) message.add_tags(tag);
  for (const Slice& slice : params_.clock.slices()) {
    v1::StepTimeline::Slice& told = *message.add_slices();
    told.set_lane(static_cast<v1::StepTimeline::Lane>(slice.lane));
    told.set_stage_name(static_cast<int>(slice.name));
    told.set_pass(NameOf(slice.moment.pass));
    told.set_layer(slice.moment.layer);
    told.set_stage(slice.moment.stage);
    told.set_begin_nanos(slice.begin_nanos - begin_nanos_);
    told.set_end_nanos(slice.end_nanos - begin_nanos_);
  }
  for (const MemorySamples::Sample& sample : memory_->samples()) {
    v1::StepTimeline::MemorySample& told = *message.add_memory();
    told.set_nanos(params_.clock.LaneNanos(sample.nanos) - begin_nanos_);
    told.set_tag(static_cast<int>(sample.tag));
    told.set_host(sample.host);
    told.set_bytes(sample.bytes);
  }
  message.set_dropped_slices(params_.clock.times().dropped_slices);
  params_.tell(message);
}

}  // namespace upipe::train
