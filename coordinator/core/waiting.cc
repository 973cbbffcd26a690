#include "coordinator/core/waiting.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/units.h"

namespace upipe::coordinator {
namespace {

bool IsOpen(const State& state, const Node& node) {
  return Holds(state, Guard::kNodeOpen, !node.record.cordoned() && !node.leaving);
}

bool IsBehindTheHead(const State& state, const Job& job) {
  const auto head = state.jobs.find(state.head);
  return head != state.jobs.end() && KeyOf(head->second.record) < KeyOf(job.record);
}

std::string Counts(int64_t ranks, const Fit& fit) {
  std::string text =
      absl::StrCat("needs ", ranks, " slots, ", fit.free, " of ", fit.known, " are free");
  for (const auto& [count, what] : {std::pair(fit.silent, "belong to silent workers"),
                                    {fit.lost, "belong to lost workers"},
                                    {fit.closed, "belong to cordoned or leaving workers"},
                                    {fit.quarantined, "are quarantined"},
                                    {fit.sick, "have a sick device"}}) {
    if (count > 0) absl::StrAppend(&text, ", ", count, " ", what);
  }
  return text;
}

// Where a generation lives that the store does not know, for it was restored; its ranks have been
// told to end. Empty when there is none.
std::string UnknownGeneration(const State& state, const Job& job) {
  if (job.record.minimum_generation() <= job.record.generation()) return "";
  const auto is_one = [&job](const std::optional<SlotHolder>& holder) {
    return holder && holder->job_id == job.record.id() &&
           holder->generation > job.record.generation();
  };
  for (const auto& [worker, node] : state.nodes) {
    if (node.lost) continue;
    for (const Slot& slot : node.slots) {
      if (is_one(slot.holder) || is_one(slot.stray)) return worker;
    }
  }
  return "";
}

// Too few slots that are ready or come free by themselves.
Wait WaitForWorkers(int64_t ranks, const Fit& fit) {
  if (fit.expected >= ranks) {
    return {v1::WAIT_REASON_SETTLING,
            absl::StrCat(Counts(ranks, fit), "; those workers were heard of a moment ago"), true};
  }
  const v1::WaitReason reason = fit.silent + fit.lost > 0   ? v1::WAIT_REASON_SILENT_WORKERS
                                : fit.closed + fit.sick > 0 ? v1::WAIT_REASON_CORDONED
                                                            : v1::WAIT_REASON_BUSY_SLOTS;
  return {reason, Counts(ranks, fit), false};
}

}  // namespace

int64_t PlannedBytesPerRank(const v1::RunPlan& plan) {
  const bool host_is_device = plan.spec().parallel().backend() != "cuda";
  int64_t bytes = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    const int64_t host = host_is_device ? rank.host_memory().arena_bytes() : 0;
    bytes = std::max(bytes, rank.memory().arena_bytes() + host);
  }
  return bytes;
}

bool IsOffered(const State& state, const Node& node, BootTime now) {
  return Holds(state, Guard::kNodeReady, StateOf(state, node, now) == v1::NODE_STATE_READY) &&
         IsOpen(state, node);
}

bool IsFree(const State& state, const Slot& slot) {
  return Holds(state, Guard::kSlotFree, !slot.holder.has_value()) && slot.device.sick().empty();
}

const char* OfBackend(const v1::JobSpec& spec) {
  return spec.parallel().backend() == "cuda" ? " of backend cuda" : "";
}

Need NeedOf(const Job& job) {
  return {.device = job.record.spec().parallel().backend() == "cuda",
          .bytes_per_rank = PlannedBytesPerRank(*job.plan)};
}

bool Suits(const Node& node, const Need& need) {
  return (node.record.backend() == "cuda") == need.device &&
         node.record.memory_per_rank_bytes() >= need.bytes_per_rank;
}

Fit FitOf(const State& state, const Need& need, BootTime now) {
  Fit fit;
  for (const auto& [worker, node] : state.nodes) {
    if (!Suits(node, need)) continue;
    const auto slots = static_cast<int64_t>(node.slots.size());
    fit.known += slots;
    const bool offered = IsOffered(state, node, now);
    if (!offered) {
      const bool ready = StateOf(state, node, now) == v1::NODE_STATE_READY;
      (ready ? fit.closed : node.lost ? fit.lost : fit.silent) += slots;
    }
    const bool lately = !node.lost && now - node.last_heard < state.timing.settle;
    for (const Slot& slot : node.slots) {
      const bool quarantined = slot.holder && slot.holder->quarantined;
      const bool sick = !slot.holder && !slot.device.sick().empty();
      if (offered && quarantined) ++fit.quarantined;
      if (offered && sick) ++fit.sick;
      if (quarantined || sick) continue;
      if (offered || (lately && IsOpen(state, node))) ++fit.expected;
      if (offered) ++fit.ready;
      if (offered && IsFree(state, slot)) ++fit.free;
    }
  }
  return fit;
}

Wait WaitOf(const State& state, const Job& job, const Fit& fit, BootTime now) {
  if (!Holds(state, Guard::kNotHeld, !job.record.held())) {
    return {v1::WAIT_REASON_HELD, "held until it is released", false};
  }
  const int64_t ranks = job.record.spec().parallel().ranks();
  if (fit.known < ranks) {
    const int64_t needed = PlannedBytesPerRank(*job.plan);
    return {v1::WAIT_REASON_TOO_FEW_SLOTS,
            absl::StrCat("needs ", ranks, " slots", OfBackend(job.record.spec()), " of ",
                         FormatBytes(needed), ", ", fit.known, " of the ",
                         NumKnownSlots(state, job.record.spec()), " known ones offer that"),
            false};
  }
  if (!Holds(state, Guard::kBackoffOver, now >= job.retry_at)) {
    return {v1::WAIT_REASON_BACKOFF,
            absl::StrCat("waits ", FormatTimeSpan(job.retry_at - now), " after a restart"), false};
  }
  if (fit.ready < ranks) return WaitForWorkers(ranks, fit);
  if (!Holds(state, Guard::kStoreSettled, !state.restored)) {
    return {v1::WAIT_REASON_SETTLING,
            "the store was restored from a backup, and not every known worker has said what it saw "
            "since",
            true};
  }
  if (const std::string worker = UnknownGeneration(state, job); !worker.empty()) {
    return {v1::WAIT_REASON_SETTLING,
            absl::StrCat("worker ", worker,
                         " still has ranks of a generation that the restored store does not know"),
            false};
  }
  if (!Holds(state, Guard::kHeadFirst, !IsBehindTheHead(state, job))) {
    return {v1::WAIT_REASON_BEHIND, absl::StrCat("behind ", state.head), false};
  }
  if (fit.free < ranks) return {v1::WAIT_REASON_BUSY_SLOTS, Counts(ranks, fit), true};
  return {};
}

}  // namespace upipe::coordinator
