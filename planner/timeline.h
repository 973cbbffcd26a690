// One rank's dry step as a timeline: for every moment the engine marks, what both pools of memory
// held when they were fullest and what was done. Pictures and traces of a plan are drawn from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/rank_context.h"
#include "kernels/api/allocator.h"
#include "planner/step_counts.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// What a rank does during one moment.
struct MomentWork {
  engine::Moment at;
  SectionCounts counts;
};

// How long that takes. Exchanges and copies beside computation make `elapsed` less than the sum.
struct MomentSeconds {
  double elapsed = 0;
  double compute = 0;
  double exchange = 0;
  double copies = 0;  // between device and host memory
};
using PriceMoment = std::function<absl::StatusOr<MomentSeconds>(const MomentWork&)>;

// A pool of memory when it was fullest in a moment.
struct PoolMoment {
  kernels::TagBytes bytes = {};
  int64_t total_bytes = 0;
};

// A moment, or a part of one: the longer ones are in two or three parts, so that what rises and
// falls within them shows.
struct TimelineMoment {
  engine::Moment at;
  PoolMoment device;
  PoolMoment host;
  int64_t ops = 0;
  double flops = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_to_host = 0;
  int64_t bytes_from_host = 0;
  MomentSeconds seconds;  // all zero without rates
};

struct Timeline {
  int rank = 0;
  bool timed = false;                   // moments have seconds
  int64_t arena_bytes = 0;              // what is taken from the device
  int64_t host_pool_bytes = 0;          // and from host memory
  kernels::TagBytes device_peaks = {};  // each category's own, wherever it was
  kernels::TagBytes host_peaks = {};
  // In order: the start, which is not part of the step, the step, and where the job evaluates one
  // evaluation.
  std::vector<TimelineMoment> moments;
};

// More micro-steps than this are alike: a timeline has the first ones, and the peak of all.
inline constexpr int64_t kMostMicroSteps = 4;
// The most moments of a timeline, but for one per pass: beyond, neighbours are merged.
inline constexpr size_t kMostMoments = 4096;

struct TimelineOptions {
  PriceMoment price;                     // none: no moment has seconds
  std::string attention_kernel = "own";  // the one scratch is counted for
};

// Runs the rank's step dry, evaluation included, and times every moment by `price`, which is given
// all of a moment's work at once; its first error is the result. `plan` needs spec (with defaults),
// schedule and its hash. Moments of the same place that follow each other, as the query chunks of a
// stage, are one.
absl::StatusOr<Timeline> RecordTimeline(const v1::RunPlan& plan, int rank,
                                        const TimelineOptions& options = {});

// How long a moment is drawn: its seconds or, without rates, its FLOPs.
double Extent(const Timeline& timeline, const TimelineMoment& moment);

// Where in `moments` a pool is fullest, the first of equals. At least one moment.
size_t FullestOnDevice(const std::vector<TimelineMoment>& moments);
size_t FullestOnHost(const std::vector<TimelineMoment>& moments);

// Adds what `next` did; memory, and the place, are those of the fuller one, the earlier of equals.
void Absorb(TimelineMoment& moment, const TimelineMoment& next);

// Merges neighbours of one pass until there are about `most`: at most one per pass more. Peaks and
// sums stay what they were.
std::vector<TimelineMoment> Thin(const std::vector<TimelineMoment>& moments, size_t most);

}  // namespace upipe::planner
