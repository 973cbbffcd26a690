// What a step's streams did when: slices of their time by stage, told by the streams themselves as
// they get there, so that nothing waits for the clock. Its memory is taken once; no slice changes a
// byte of what is planned or a bit of what is computed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "engine/rank_context.h"
#include "kernels/api/stream.h"

namespace upipe::engine {

// What a stream does (docs/metrics.md).
enum class StageName : uint8_t {
  kProjection,
  kExchange,
  kAttention,
  kReturn,
  kMlp,
  kLoss,
  kEmbedding,
  kWeights,
  kGradients,
  kOptimizer,
  kOffload
};
inline constexpr int kNumStageNames = 11;
// "projection".
const char* NameOf(StageName name);

// The streams of a rank, as StepTimeline.Lane numbers them.
enum class Lane : uint8_t { kCompute, kSide, kRing, kCopy, kHost, kGather };
inline constexpr int kNumLanes = 6;

struct Slice {
  Lane lane = Lane::kCompute;
  StageName name = StageName::kProjection;
  Moment moment;
  int64_t begin_nanos = 0;  // of std::chrono::steady_clock
  int64_t end_nanos = 0;
};

// A step's time by stage. Streams run beside each other: the sum may exceed the step.
struct StepTimes {
  std::array<int64_t, kNumStageNames> stage_nanos = {};
  // Of transfers on other lanes while the compute lane computed, each lane's for itself.
  int64_t hidden_nanos = 0;
  int64_t dropped_slices = 0;  // there was no room for: in no time and in no list
};

// Adds up slices of all lanes, told by where one ends and the next begins, in the order of time.
class SliceSums {
 public:
  // From `nanos` on the lane does `name`, or nothing. Not before any time told earlier.
  // Returns the slice that ends here, if one does.
  std::optional<Slice> Turn(Lane lane, int64_t nanos, std::optional<StageName> name,
                            const Moment& moment);
  const StepTimes& times() const { return times_; }
  StepTimes& times() { return times_; }

 private:
  struct Doing {
    std::optional<StageName> name;
    Moment moment;
    int64_t since = 0;
  };
  std::array<Doing, kNumLanes> doing_;
  int64_t now_ = 0;
  StepTimes times_;
};

// One host thread drives it, the one that drives the rank. Outlives the streams it watches.
class StepClock {
 public:
  struct Capacity {
    int pending = 8192;   // changes of a lane that its stream has not passed, or not been asked for
    int slices = 16'384;  // kept of one step
  };
  explicit StepClock(const Capacity& capacity);
  StepClock() : StepClock(Capacity{}) {}
  ~StepClock();

  // Borrowed. Once, before the first step.
  void Watch(const RankStreams& streams);

  // Between the two, what Begin and End say is recorded; with keep_slices, slices too, until there
  // is no room.
  void BeginStep(bool keep_slices);
  // Waits for the streams. Their first error, if any.
  absl::Status EndStep();
  // Of the last step that ended; slices by begin.
  const StepTimes& times() const { return sums_.times(); }
  absl::Span<const Slice> slices() const { return slices_; }
  // When the compute lane came to what the host was at then: the host enqueues a step ahead of its
  // streams. Of the last step, if it kept slices; both of std::chrono::steady_clock. Between two
  // turns of the lane in proportion.
  int64_t LaneNanos(int64_t host_nanos) const;

  // Where the step is, for slices that do not say.
  void set_moment(const Moment& moment) { moment_ = moment; }
  const Moment& moment() const { return moment_; }
  // From this point of `stream` on it does `name`, or waits for another lane, until End; then what
  // it did before. Nothing on a stream that is not watched.
  void Begin(const kernels::Stream& stream, std::optional<StageName> name, const Moment& moment);
  void End(const kernels::Stream& stream);

 private:
  struct LaneRecord;
  LaneRecord* Find(const kernels::Stream& stream);
  void Turn(LaneRecord& lane, std::optional<StageName> name, const Moment& moment);
  // Takes in what the streams have passed.
  void Fold();

  const Capacity capacity_;
  bool recording_ = false;
  bool keeps_slices_ = false;
  Moment moment_;
  std::array<std::unique_ptr<LaneRecord>, kNumLanes> lanes_;
  SliceSums sums_;
  std::vector<Slice> slices_;
  struct Place {
    int64_t host_nanos = 0;
    int64_t lane_nanos = 0;
  };
  std::vector<Place> places_;  // turns of the compute lane; both times ascend
};

// While it lives, what is enqueued on the context's stream is a slice of that stage.
class Timed {
 public:
  // `stage`: of the head-chunk schedule, where it is not the moment's.
  Timed(const RankContext& context, StageName name) : Timed(context, name, std::nullopt) {}
  Timed(const RankContext& context, StageName name, int stage)
      : Timed(context, name, std::optional<int>(stage)) {}
  ~Timed() {
    if (clock_ != nullptr) clock_->End(stream_);
  }
  Timed(const Timed&) = delete;

 protected:
  Timed(const RankContext& context, std::optional<StageName> name, std::optional<int> stage);

 private:
  StepClock* const clock_;
  const kernels::Stream& stream_;
};

// While it lives, the context's stream waits for another lane, whose time that is.
class Waiting : public Timed {
 public:
  explicit Waiting(const RankContext& context) : Timed(context, std::nullopt, std::nullopt) {}
};

}  // namespace upipe::engine
