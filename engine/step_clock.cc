#include "engine/step_clock.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "common/check.h"
#include "common/metrics/names.h"
#include "common/status.h"

namespace upipe::engine {
namespace {

// What moves between ranks or pools: hidden where the rank computes meanwhile.
bool IsTransfer(StageName name) {
  switch (name) {
    case StageName::kExchange:
    case StageName::kReturn:
    case StageName::kWeights:
    case StageName::kGradients:
    case StageName::kOffload:
      return true;
    default:
      return false;
  }
}

}  // namespace

const char* NameOf(StageName name) {
  static_assert(kStageNames.size() == kNumStageNames);
  return kStageNames[static_cast<size_t>(name)];
}

std::optional<Slice> SliceSums::Turn(Lane lane, int64_t nanos, std::optional<StageName> name,
                                     const Moment& moment) {
  nanos = std::max(nanos, now_);
  const Doing& compute = doing_[static_cast<size_t>(Lane::kCompute)];
  if (compute.name && !IsTransfer(*compute.name)) {
    for (const Doing& other : doing_) {
      if (other.name && IsTransfer(*other.name)) times_.hidden_nanos += nanos - now_;
    }
  }
  now_ = nanos;
  Doing& doing = doing_[static_cast<size_t>(lane)];
  std::optional<Slice> ended;
  if (doing.name && nanos > doing.since) {
    ended = Slice{lane, *doing.name, doing.moment, doing.since, nanos};
    times_.stage_nanos[static_cast<size_t>(*doing.name)] += nanos - doing.since;
  }
  doing = {name, moment, nanos};
  return ended;
}

// A stream and the changes of what it does that it has been asked to stamp: a ring, oldest first.
struct StepClock::LaneRecord {
  struct Change {
    kernels::TimeStamp at{0};
    int64_t host_nanos = 0;  // when it was asked for
    std::optional<StageName> name;
    Moment moment;
  };
  struct Open {
    std::optional<StageName> name;
    Moment moment;
    bool changed = true;  // what the lane did before; else nothing is to be changed back
  };
  static constexpr int kDepth = 8;

  Lane lane = Lane::kCompute;
  kernels::Stream* stream = nullptr;
  std::unique_ptr<Change[]> changes;
  int size = 0, first = 0, count = 0;
  int64_t last_nanos = 0;  // of the last change taken in
  std::array<Open, kDepth> open;
  int depth = 0;

  Change& oldest() { return changes[first]; }
};

StepClock::StepClock(const Capacity& capacity) : capacity_(capacity) {
  slices_.reserve(capacity.slices);
  places_.reserve(2 * capacity.slices + 2);  // and where the step begins and ends
}

StepClock::~StepClock() = default;

void StepClock::Watch(const RankStreams& streams) {
  kernels::Stream* const of_lanes[kNumLanes] = {streams.compute.get(), streams.side.get(),
                                                streams.ring.get(),    streams.copy.get(),
                                                streams.host.get(),    streams.gather.get()};
  for (int i = 0; i < kNumLanes; ++i) {
    UPIPE_CHECK(lanes_[i] == nullptr) << "a clock watches one rank's streams";
    lanes_[i] = std::make_unique<LaneRecord>();
    lanes_[i]->lane = static_cast<Lane>(i);
    lanes_[i]->stream = of_lanes[i];
    lanes_[i]->size = capacity_.pending;
    lanes_[i]->changes = std::make_unique<LaneRecord::Change[]>(capacity_.pending);
  }
}

void StepClock::BeginStep(bool keep_slices) {
  sums_ = SliceSums();
  slices_.clear();
  places_.clear();
  keeps_slices_ = keep_slices;
  const int64_t now = kernels::SteadyNanos();
  places_.push_back({now, now});
  recording_ = lanes_[0] != nullptr;
}

absl::Status StepClock::EndStep() {
  if (!recording_) return absl::OkStatus();
  recording_ = false;
  const int64_t enqueued = kernels::SteadyNanos();
  for (const auto& lane : lanes_) {
    UPIPE_CHECK(lane->depth == 0) << lane->depth << " slices open at the end of a step";
    UPIPE_RETURN_IF_ERROR(lane->stream->Synchronize());
  }
  Fold();
  places_.push_back({enqueued, std::max(kernels::SteadyNanos(), places_.back().lane_nanos)});
  for (const auto& lane : lanes_) lane->last_nanos = 0;
  std::sort(slices_.begin(), slices_.end(), [](const Slice& a, const Slice& b) {
    return std::tie(a.begin_nanos, a.lane) < std::tie(b.begin_nanos, b.lane);
  });
  return absl::OkStatus();
}

int64_t StepClock::LaneNanos(int64_t host_nanos) const {
  const auto after = std::upper_bound(places_.begin(), places_.end(), host_nanos,
                                      [](int64_t t, const Place& p) { return t < p.host_nanos; });
  if (after == places_.begin()) return host_nanos;
  const Place& before = *(after - 1);
  if (after == places_.end()) return before.lane_nanos;
  const double share = static_cast<double>(host_nanos - before.host_nanos) /
                       static_cast<double>(after->host_nanos - before.host_nanos);
  return before.lane_nanos +
         static_cast<int64_t>(share * static_cast<double>(after->lane_nanos - before.lane_nanos));
}

StepClock::LaneRecord* StepClock::Find(const kernels::Stream& stream) {
  for (const auto& lane : lanes_) {
    if (lane != nullptr && lane->stream == &stream) return lane.get();
  }
  return nullptr;
}

void StepClock::Begin(const kernels::Stream& stream, std::optional<StageName> name,
                      const Moment& moment) {
  LaneRecord* lane = recording_ ? Find(stream) : nullptr;
  if (lane == nullptr) return;
  UPIPE_CHECK(lane->depth < LaneRecord::kDepth) << "slices within slices";
  LaneRecord::Open& open = lane->open[lane->depth++];
  const LaneRecord::Open* around = lane->depth > 1 ? &lane->open[lane->depth - 2] : nullptr;
  const bool same = around == nullptr ? !name : around->name == name && around->moment == moment;
  open = {name, moment, !same};
  if (same) return;
  // Room for this change and for the ends of all that is open.
  if (lane->count + lane->depth + 1 > lane->size) Fold();
  if (lane->count + lane->depth + 1 > lane->size) {
    ++sums_.times().dropped_slices;
    open = around != nullptr ? *around : LaneRecord::Open{};
    open.changed = false;
    return;
  }
  Turn(*lane, name, moment);
}

void StepClock::End(const kernels::Stream& stream) {
  LaneRecord* lane = recording_ ? Find(stream) : nullptr;
  if (lane == nullptr || lane->depth == 0) return;
  const bool changed = lane->open[--lane->depth].changed;
  if (!changed) return;
  const LaneRecord::Open around =
      lane->depth > 0 ? lane->open[lane->depth - 1] : LaneRecord::Open{};
  Turn(*lane, around.name, around.moment);
}

void StepClock::Turn(LaneRecord& lane, std::optional<StageName> name, const Moment& moment) {
  LaneRecord::Change& change = lane.changes[(lane.first + lane.count) % lane.size];
  ++lane.count;
  change.at.store(0, std::memory_order_relaxed);
  change.host_nanos = kernels::SteadyNanos();
  change.name = name;
  change.moment = moment;
  lane.stream->Stamp(&change.at);
}

// Merges the lanes by time, as far as no change that a stream has yet to pass could come before.
void StepClock::Fold() {
  while (true) {
    LaneRecord* next = nullptr;
    int64_t at = 0;
    int64_t known = std::numeric_limits<int64_t>::max();
    for (const auto& lane : lanes_) {
      if (lane->count == 0) continue;
      const int64_t nanos = lane->oldest().at.load(std::memory_order_acquire);
      if (nanos == 0) {
        known = std::min(known, lane->last_nanos);
      } else if (next == nullptr || nanos < at) {
        next = lane.get();
        at = nanos;
      }
    }
    if (next == nullptr || at > known) return;
    const LaneRecord::Change& change = next->oldest();
    const std::optional<Slice> ended = sums_.Turn(next->lane, at, change.name, change.moment);
    if (ended && keeps_slices_) {
      if (static_cast<int>(slices_.size()) < capacity_.slices) {
        slices_.push_back(*ended);
      } else {
        ++sums_.times().dropped_slices;
      }
    }
    if (next->lane == Lane::kCompute && keeps_slices_ && places_.size() + 1 < places_.capacity()) {
      places_.push_back({change.host_nanos, std::max(at, places_.back().lane_nanos)});
    }
    next->last_nanos = at;
    next->first = (next->first + 1) % next->size;
    --next->count;
  }
}

Timed::Timed(const RankContext& context, std::optional<StageName> name, std::optional<int> stage)
    : clock_(context.clock()), stream_(context.stream()) {
  if (clock_ == nullptr) return;
  Moment moment = clock_->moment();
  if (stage) moment.stage = *stage;
  clock_->Begin(stream_, name, moment);
}

}  // namespace upipe::engine
