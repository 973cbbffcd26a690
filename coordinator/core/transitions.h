// The rows of the control plane's job table and the guards they stand behind, by name: each step
// counts the rows it fired, and a test may break one guard to see that somebody notices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace upipe::coordinator {

enum class Row : uint8_t {
  kSubmitted,
  kSubmitRepeated,
  kPlanned,
  kPlanRefused,
  kPlannerCrashed,
  kPlaced,
  kResumeCommitted,
  kFirstBarrier,
  kStartFailed,
  kProgress,
  kCheckpointCommitted,
  kRunFailed,
  kStalled,
  kSuspect,
  kNewIncarnation,
  kNodeLost,
  kNodeFenced,
  kDrained,  // by an operator, or a worker that leaves
  kTimeLimit,
  kAllFinished,
  kCancelledUnplaced,
  kCancelPlaced,
  kCancelWhileStopping,
  kCancelTooLate,
  kHeld,
  kReleased,
  kStoppedOnNotice,  // ranks left at a boundary without an order of this coordinator
  kRankGone,
  kRestarted,
  kRequeued,
  kPlanFellShort,  // a worker's libraries take more than was counted: planned once more
  kBudgetSpent,
  kEndedSucceeded,
  kEndedFailed,
  kEndedCancelled,
  kCancelWaitsForNode,
  kLateReport,  // terminal, or of an older generation: killed
  kCount
};
inline constexpr size_t kNumRows = static_cast<size_t>(Row::kCount);
const char* NameOf(Row row);

enum class Guard : uint8_t {
  kRequestIsNew,   // a known request id starts nothing
  kFenceMatches,   // a report counts for its own generation and nonce only
  kHelloIsLater,   // an earlier start or session of a worker proves nothing
  kReportIsLater,  // a rank's state never goes back
  kPlanHashEqual,
  kNodeReady,  // silent workers' slots are not offered
  kNodeOpen,   // neither cordoned nor leaving
  kSlotFree,
  kNotHeld,
  kBackoffOver,
  kHeadFirst,        // nobody overtakes the head of the queue
  kAllReady,         // addresses of all ranks
  kProposalIsOlder,  // what an attempt goes on from was written by an earlier one
  kResumeOnce,       // the committed choice is never changed
  kCommitIsNewer,
  kFinalManifest,  // no success before it
  kIntentRises,
  kExpiryOver,      // presumed gone only by time
  kProofFreesSlot,  // exited is not gone
  kGenerationDead,  // closed only when no rank of it can go on
  kReachableGone,   // closed only when those who can be asked have proven it
  kBudgetLeft,
  kStoreSettled,  // a restored store places nothing before it knows what workers have seen
  kCount
};
inline constexpr size_t kNumGuards = static_cast<size_t>(Guard::kCount);
const char* NameOf(Guard guard);

// Part of State.
struct Transitions {
  std::array<int64_t, kNumRows> fired = {};
  std::optional<Guard> broken;  // tests only: holds whatever is the case
};

}  // namespace upipe::coordinator
