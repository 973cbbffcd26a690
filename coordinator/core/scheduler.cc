// Planning and placing: first in, first out, a gang whole or not at all.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/units.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxPlanners = 4;  // asked for at a time

}  // namespace

void Turn::Schedule() {
  const std::map<int64_t, std::string> queue = state_.queue;
  int planners = 0;
  for (const auto& [number, id] : queue) planners += state_.jobs.at(id).planner_running ? 1 : 0;
  std::string ahead;  // the first job that waits for busy slots; later ones do not overtake it
  for (const auto& [number, id] : queue) {
    Job& job = state_.jobs.at(id);
    if (job.record.state() == v1::JOB_STATE_PLANNING) {
      if (job.planner_running || planners >= kMaxPlanners) continue;
      StartPlanning(job);
      planners += job.planner_running ? 1 : 0;
    } else if (!TryPlace(job, ahead) && ahead.empty() && state_.queue.contains(number)) {
      ahead = id;
    }
  }
}

// A job that more slots might serve waits for workers to join, but not for ever. True when it
// failed.
bool Turn::RefuseOverCapacity(Job& job, int64_t slots, std::string reason) {
  SetReason(job, reason);
  const BootTime since = std::max(job.known_since, state_.last_node_joined);
  if (now_.boot - since < state_.timing.start_deadline) return false;
  FailUnplaced(
      job, v1::CAUSE_KIND_PLAN_REFUSED,
      absl::StrCat(reason, "; no worker joined for ", FormatTimeSpan(state_.timing.start_deadline),
                   slots == 0 ? "; start workers" : "; add workers or lower parallel.ranks"));
  return true;
}

void Turn::StartPlanning(Job& job) {
  const int64_t ranks = job.record.spec().parallel().ranks();
  std::optional<int64_t> bytes = OfferedBytesPerRank(state_, ranks);
  if (!bytes) {
    const int64_t slots = NumKnownSlots(state_);
    RefuseOverCapacity(job, slots,
                       absl::StrCat("needs ", ranks, " slots, the ", state_.nodes.size(),
                                    " known workers have ", slots));
    return;
  }
  SetReason(job, "");
  if (job.record.spec().train().has_memory_per_rank()) {
    bytes = std::min(*bytes, job.record.spec().train().memory_per_rank());
  }
  job.planner_running = true;
  out_.actions.push_back(StartPlanner{job.record.id(), job.record.spec(), *bytes});
}

bool Turn::TryPlace(Job& job, absl::string_view ahead) {
  const int64_t ranks = job.record.spec().parallel().ranks();
  const int64_t needed = PlannedBytesPerRank(*job.plan);
  int64_t known = 0;
  int64_t silent = 0;
  int64_t lost = 0;
  std::vector<std::pair<Node*, std::vector<int>>> offers;
  int64_t free = 0;
  for (auto& [worker, node] : state_.nodes) {
    if (node.record.memory_per_rank_bytes() < needed) continue;
    known += node.record.num_slots();
    if (const auto node_state = StateOf(state_, node, now_.boot);
        node_state != v1::NODE_STATE_READY) {
      silent += node.record.num_slots();
      if (node_state == v1::NODE_STATE_LOST) lost += node.record.num_slots();
      continue;
    }
    auto& [where, slots] = offers.emplace_back(&node, std::vector<int>());
    for (size_t s = 0; s < node.slots.size(); ++s) {
      if (!node.slots[s].holder) slots.push_back(s);
    }
    free += slots.size();
  }
  if (known < ranks) {
    // Not in the way of later jobs: it waits for workers, not for slots to come free.
    RefuseOverCapacity(job, known,
                       absl::StrCat("needs ", ranks, " slots of ", FormatBytes(needed), ", ", known,
                                    " of the ", NumKnownSlots(state_), " known ones offer that"));
    return true;
  }
  if (known - lost < ranks) {
    // It waits for a lost worker to come back: no reason for others to wait with it.
    SetReason(job, absl::StrCat("needs ", ranks, " slots, ", free, " of ", known, " are free, ",
                                lost, " belong to lost workers"));
    return true;
  }
  if (!ahead.empty() || free < ranks) {
    SetReason(
        job, !ahead.empty()
                 ? absl::StrCat("behind ", ahead)
                 : absl::StrCat(
                       "needs ", ranks, " slots, ", free, " of ", known, " are free",
                       silent == 0 ? "" : absl::StrCat(", ", silent, " belong to silent workers")));
    return false;
  }
  std::stable_sort(offers.begin(), offers.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  std::vector<std::pair<Node*, int>> places;
  for (const auto& [node, slots] : offers) {
    for (int slot : slots) {
      if (static_cast<int64_t>(places.size()) < ranks) places.emplace_back(node, slot);
    }
  }
  Place(job, places);
  return true;
}

void Turn::Place(Job& job, const std::vector<std::pair<Node*, int>>& places) {
  const int64_t generation = job.record.generation() + 1;
  job.record.set_generation(generation);
  job.record.set_state(v1::JOB_STATE_STARTING);
  Attempt& attempt = job.attempt.emplace();
  attempt.record.set_job_id(job.record.id());
  attempt.record.set_generation(generation);
  attempt.record.set_nonce(state_.new_nonce());
  attempt.soft.resize(places.size());
  attempt.last_launch = now_.boot;
  attempt.kill_at = now_.boot;
  int number = 0;
  for (const auto& [node, slot] : places) {
    v1::RankRecord& rank = *attempt.record.add_ranks();
    rank.set_worker(node->record.worker());
    rank.set_node_id(node->record.node_id());
    rank.set_incarnation(node->record.incarnation());
    rank.set_slot(slot);
    rank.set_state(v1::RANK_STATE_PLACED);
    node->slots[slot].holder =
        SlotHolder{job.record.id(), generation, attempt.record.nonce(), number++};
  }
  state_.queue.erase(job.record.submit_number());
  state_.active.insert(job.record.id());
  job.reason.clear();
  AddEvent(job, "STARTING", absl::StrCat("placed on ", places.size(), " slots"));
  for (int r = 0; r < attempt.record.ranks_size(); ++r) SendStart(job, r);
}

}  // namespace upipe::coordinator
