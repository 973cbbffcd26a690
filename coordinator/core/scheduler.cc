// Planning and placing: higher priority first, equal ones as they came, a gang whole or not at all.
// The first job that waits for busy slots is the head: slots are kept for it as they come free.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/units.h"
#include "coordinator/core/turn.h"

namespace upipe::coordinator {
namespace {

constexpr int kMaxPlanners = 4;                     // asked for at a time
constexpr int64_t kGenerationsSkipped = 1'000'000;  // by a restore

}  // namespace

void Turn::Schedule() {
  // Those that an urgent job overtook are not counted against it.
  int planners = 0;
  for (auto at = state_.unplanned.begin();
       at != state_.unplanned.end() && planners < kMaxPlanners;) {
    Job& job = state_.jobs.at((at++)->second);  // refused jobs leave
    if (!job.planner_running) StartPlanning(job);
    planners += job.planner_running;
  }
  state_.head.clear();
  if (state_.queue.empty() || (state_.restored && !IsSettled())) return;
  for (auto at = state_.queue.begin(); at != state_.queue.end();) {
    Job& job = state_.jobs.at((at++)->second);  // placed jobs leave the queue
    const bool waits = !TryPlace(job);
    if (waits && state_.head.empty()) state_.head = job.record.id();
    if (!Holds(Guard::kHeadFirst, !waits)) break;
  }
}

// After a restore: whether every known worker said what it saw, or is presumed to hold nothing.
// What a lost worker saw, or one that the backup does not know, nobody said: generations go on far
// above, so that none is met twice where files and workers remember it.
bool Turn::IsSettled() {
  const bool settled = std::all_of(state_.nodes.begin(), state_.nodes.end(), [](const auto& known) {
    return known.second.greeted || known.second.lost;
  });
  if (!settled) return Holds(Guard::kStoreSettled, false);
  state_.restored = false;
  dirty_epoch_ = true;
  for (auto& [id, job] : state_.jobs) {
    v1::JobRecord& record = job.record;
    if (IsTerminal(record.state())) continue;
    record.set_minimum_generation(kGenerationsSkipped +
                                  std::max(record.generation(), record.minimum_generation()));
    Dirty(job);
  }
  Note("the restored store knows of every worker; jobs are placed again");
  return true;
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
  std::optional<int64_t> bytes = OfferedBytesPerRank(state_, job.record.spec());
  if (!bytes) {
    const int64_t slots = NumKnownSlots(state_, job.record.spec());
    std::string reason = absl::StrCat("needs ", ranks, " slots", OfBackend(job.record.spec()),
                                      ", the ", state_.nodes.size(), " known workers have ", slots);
    // What ran once waits for workers for as long as they stay away.
    if (job.record.generation() > 0) return SetReason(job, std::move(reason));
    RefuseOverCapacity(job, slots, std::move(reason));
    return;
  }
  SetReason(job, "");
  if (job.record.spec().train().has_memory_per_rank()) {
    bytes = std::min(*bytes, job.record.spec().train().memory_per_rank());
  }
  job.planner_running = true;
  StartPlanner start = {job.record.id(), job.record.spec(), *bytes};
  if (job.record.has_measured()) {
    auto earlier = std::make_shared<v1::RunPlan>(*job.plan);
    *earlier->mutable_measured() = job.record.measured();
    start.earlier = std::move(earlier);
  }
  out_.actions.push_back(std::move(start));
}

bool Turn::TryPlace(Job& job) {
  const Wait wait = WaitOf(state_, job, FitFor(NeedOf(job)), now_.boot);
  if (wait.reason == v1::WAIT_REASON_UNSPECIFIED) {
    Place(job);
    return true;
  }
  // What ran once was planned for workers that exist: it waits for as long as they stay away.
  if (wait.reason == v1::WAIT_REASON_TOO_FEW_SLOTS && job.record.generation() == 0) {
    RefuseOverCapacity(job, NumKnownSlots(state_, job.record.spec()), wait.message);
    return true;
  }
  // The time that is left changes all the time; Why tells it.
  SetReason(job, wait.reason == v1::WAIT_REASON_BACKOFF ? "waits after a restart" : wait.message);
  return !wait.blocks;
}

const Fit& Turn::FitFor(const Need& need) {
  const auto known = fits_.find(need);
  if (known != fits_.end()) return known->second;
  return fits_[need] = FitOf(state_, need, now_.boot);
}

void Turn::Place(Job& job) {
  fits_.clear();
  struct Offer {
    Node* node;
    std::vector<int> slots;
  };
  const int ranks = job.record.spec().parallel().ranks();
  const Need need = NeedOf(job);
  std::vector<Offer> offers;
  for (auto& [worker, node] : state_.nodes) {
    if (!Suits(node, need) || !IsOffered(state_, node, now_.boot)) continue;
    Offer& offer = offers.emplace_back(Offer{&node, {}});
    for (size_t s = 0; s < node.slots.size(); ++s) {
      if (IsFree(state_, node.slots[s])) offer.slots.push_back(s);
    }
  }
  std::stable_sort(offers.begin(), offers.end(),
                   [](const Offer& a, const Offer& b) { return a.slots.size() > b.slots.size(); });
  Attempt attempt = NewAttempt(job);
  for (const Offer& offer : offers) {
    for (int slot : offer.slots) {
      const int number = attempt.record.ranks_size();
      if (number == ranks) break;
      v1::RankRecord& rank = *attempt.record.add_ranks();
      rank.set_worker(offer.node->record.worker());
      rank.set_node_id(offer.node->record.node_id());
      rank.set_incarnation(offer.node->record.incarnation());
      rank.set_slot(slot);
      rank.set_state(v1::RANK_STATE_PLACED);
      offer.node->slots[slot].holder =
          SlotHolder{job.record.id(), attempt.record.generation(), attempt.record.nonce(), number};
    }
  }
  attempt.soft.resize(ranks);
  job.attempt = std::move(attempt);
  job.record.set_generation(job.attempt->record.generation());
  job.record.set_state(v1::JOB_STATE_STARTING);
  job.record.clear_retry_at_unix_millis();
  state_.queue.erase(KeyOf(job.record));
  state_.active.insert(job.record.id());
  job.reason.clear();
  Fired(Row::kPlaced);
  AddEvent(job, "STARTING", absl::StrCat("placed on ", ranks, " slots"));
  for (int r = 0; r < ranks; ++r) SendStart(job, r);
}

// The next generation of a job; what is left of the one before is put aside.
Attempt Turn::NewAttempt(Job& job) {
  if (job.attempt) PutAside(job);
  Attempt attempt;
  attempt.record.set_job_id(job.record.id());
  attempt.record.set_generation(1 +
                                std::max(job.record.generation(), job.record.minimum_generation()));
  attempt.record.set_nonce(state_.new_nonce());
  attempt.record.set_placed_unix_millis(now_.unix_millis);
  attempt.placed_at = now_.boot;
  attempt.last_launch = now_.boot;
  attempt.kill_at = now_.boot;
  attempt.counted_until = now_.boot;
  return attempt;
}

// Its record stays while a rank of it may still hold a slot, and says which: what this step learned
// of it is in no other batch.
void Turn::PutAside(Job& job) {
  const v1::AttemptRecord& record = job.attempt->record;
  const auto& ranks = record.ranks();
  const bool awaited = std::any_of(ranks.begin(), ranks.end(), [this](const auto& rank) {
    return HoldsSlot(rank) && FindNode(rank.worker()) != nullptr;
  });
  if (awaited) {
    EarlierAttempt& earlier = job.earlier[record.generation()];
    earlier = {record, job.attempt->revision};
    SaveEarlier(job, earlier);
  } else {
    Drop(AttemptKey(job.record.id(), record.generation()), job.attempt->revision);
  }
  job.attempt.reset();
}

}  // namespace upipe::coordinator
