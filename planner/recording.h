// A dry run written down: what it asked of the two allocators, and what it counted, in fragments
// that begin where the step goes on to another pass or another group of layers. A recording can be
// played to fresh allocators, whole or put together from fragments (compose.h), and gives the bytes
// of the run it is of, arena and moments included.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/allocator.h"
#include "kernels/api/memory_tag.h"
#include "planner/dry_run.h"

namespace upipe::planner {

// One request to an allocator, or a mark.
struct RecordedEvent {
  enum class Kind : uint8_t { kAllocate, kRelease, kSettle, kMark };

  Kind kind = Kind::kMark;
  bool host = false;  // of the pool of host memory
  // Allocate and release.
  kernels::MemoryTag tag = kernels::MemoryTag::kWorkspace;
  int64_t bytes = 0;
  int stream = 0;  // allocate: index into StreamNames
  // Release: how many buffers of the pool that are alive by then are younger. It does not depend on
  // how many older ones there are, so it holds wherever a fragment is played.
  int64_t younger = 0;
  engine::Moment moment;  // mark

  bool operator==(const RecordedEvent&) const = default;
};

// What happens between two cuts: a mark of another pass or group, or the settling of the pools that
// begins a round (a vote, a micro-step, an evaluation).
struct Fragment {
  static constexpr int kNoGroup = -1;

  int round = 0;  // times the pools had been settled
  StepPass pass = StepPass::kIdle;
  int group = kNoGroup;               // layer / layers of a group
  std::vector<RecordedEvent> events;  // the mark or settling that begins it first
  // From the first round on.
  StepCounts counts;
  std::vector<int64_t> bytes_sent_to_peer;
};

// Rounds of what DryRunRank runs: allocation, the vote, the micro-steps, the evaluation.
inline constexpr int kAllocationRound = 0;
inline constexpr int kFirstMicroStepRound = 2;

// Names of the streams that blocks were for, without the rank's number; shared by recordings whose
// fragments are played together.
using StreamNames = std::vector<std::string>;

struct Recording {
  RankDryRun result;
  std::vector<Fragment> fragments;
};

// Runs dry and writes down. `group_layers` consecutive layers are one group. Errors are those of
// DryRunRank.
absl::StatusOr<Recording> Record(const v1::RunPlan& plan, int rank,
                                 const std::string& attention_kernel, int64_t group_layers,
                                 StreamNames& streams);

// A fragment on its place in another run.
struct Played {
  const Fragment* fragment = nullptr;
  int64_t layers_later = 0;  // added to the layer of its marks
  int64_t times = 1;         // in the counts; its events are played once
};

// The most that is held at once at one kind of moment, as it grows with the context: every category
// at its fullest, and the scratch of single operations by itself, of which only the largest counts.
struct MomentPeak {
  kernels::TagBytes held_bytes = {};
  std::vector<int64_t> scratch_bytes;  // different sizes, in the order they first came
};
// By pass and stage, all layers together.
using MomentPeaks = std::map<std::pair<StepPass, int>, MomentPeak>;

// A run without the places of its blocks: all that two short runs need to tell of a long one.
struct Outline {
  StepCounts counts;  // of one step
  MomentPeaks device, host;
  int64_t unused_bytes = 0;  // of the device's arena when most of it was in use
};
// FailedPrecondition as Play's.
absl::StatusOr<Outline> OutlineOf(const std::vector<Played>& fragments, const v1::RunPlan& plan);

// What a run of these fragments counts and takes, of a plan with as many micro-steps as they have.
// FailedPrecondition when a release finds another buffer than it was recorded with: the fragments
// are not of one run.
absl::StatusOr<RankDryRun> Play(const std::vector<Played>& fragments, const v1::RunPlan& plan,
                                int rank, const StreamNames& streams);

}  // namespace upipe::planner
