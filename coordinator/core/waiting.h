// Why a queued job is not running: one reason, ranked as v1::WaitReason is. Pure functions; the
// scheduler places exactly the jobs that have none.
#pragma once

#include <cstdint>
#include <string>

#include "coordinator/core/state.h"

namespace upipe::coordinator {

// What every rank of a job needs of its node.
struct Need {
  bool device = false;         // one of its own: backend cuda
  int64_t bytes_per_rank = 0;  // as planned

  friend auto operator<=>(const Need&, const Need&) = default;
};
// Of a planned job.
Need NeedOf(const Job& job);
bool Suits(const Node& node, const Need& need);

// Slots of nodes that suit a job.
struct Fit {
  int64_t known = 0;     // whatever their nodes' states
  int64_t expected = 0;  // of open nodes heard of lately, quarantined and sick ones left out: busy
                         // ones come free
  int64_t ready = 0;     // of these, on READY nodes
  int64_t free = 0;      // of these, held by nobody
  int64_t silent = 0;
  int64_t lost = 0;
  int64_t closed = 0;  // cordoned or leaving, not silent
  int64_t quarantined = 0;
  int64_t sick = 0;
};
Fit FitOf(const State& state, const Need& need, BootTime now);
// " of backend cuda" for a job that needs devices; nothing for the others.
const char* OfBackend(const v1::JobSpec& spec);

// Whether new ranks may be placed on a node, and in a slot of it.
bool IsOffered(const State& state, const Node& node, BootTime now);
bool IsFree(const State& state, const Slot& slot);

struct Wait {
  v1::WaitReason reason = v1::WAIT_REASON_UNSPECIFIED;  // unspecified: it can be placed now
  std::string message;
  bool blocks = false;  // those behind it wait too: slots are kept for it as they come free
};
// Of a QUEUED job with its fit.
Wait WaitOf(const State& state, const Job& job, const Fit& fit, BootTime now);

// Bytes the busiest rank of a plan takes from its machine; on cuda, from its device.
int64_t PlannedBytesPerRank(const v1::RunPlan& plan);

}  // namespace upipe::coordinator
