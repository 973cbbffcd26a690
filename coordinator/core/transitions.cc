#include "coordinator/core/transitions.h"

#include <iterator>

#include "common/check.h"

namespace upipe::coordinator {
namespace {

constexpr const char* kRowNames[] = {"submitted",
                                     "submit repeated",
                                     "planned",
                                     "plan refused",
                                     "planner crashed",
                                     "placed",
                                     "resume committed",
                                     "first barrier",
                                     "start failed",
                                     "progress",
                                     "checkpoint committed",
                                     "run failed",
                                     "stalled",
                                     "suspect",
                                     "new incarnation",
                                     "node lost",
                                     "node fenced",
                                     "drained",
                                     "time limit",
                                     "all finished",
                                     "cancelled unplaced",
                                     "cancel placed",
                                     "cancel while stopping",
                                     "cancel too late",
                                     "held",
                                     "released",
                                     "stopped on notice",
                                     "rank gone",
                                     "restarted",
                                     "requeued",
                                     "plan fell short",
                                     "budget spent",
                                     "ended succeeded",
                                     "ended failed",
                                     "ended cancelled",
                                     "cancel waits for node",
                                     "late report"};
static_assert(std::size(kRowNames) == kNumRows);

constexpr const char* kGuardNames[] = {
    "request is new", "fence matches", "hello is later",    "report is later",  "plan hash equal",
    "node ready",     "node open",     "slot free",         "not held",         "back-off over",
    "head first",     "all ready",     "proposal is older", "resume once",      "commit is newer",
    "final manifest", "intent rises",  "expiry over",       "proof frees slot", "generation dead",
    "reachable gone", "budget left",   "store settled"};
static_assert(std::size(kGuardNames) == kNumGuards);

}  // namespace

const char* NameOf(Row row) {
  UPIPE_CHECK(static_cast<size_t>(row) < kNumRows);
  return kRowNames[static_cast<size_t>(row)];
}

const char* NameOf(Guard guard) {
  UPIPE_CHECK(static_cast<size_t>(guard) < kNumGuards);
  return kGuardNames[static_cast<size_t>(guard)];
}

}  // namespace upipe::coordinator
