#include "tests/sim/system/observer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/sim/system/cluster.h"

namespace upipe::sim {
namespace {

using coordinator::Job;
using coordinator::Node;
using coordinator::Slot;

constexpr size_t kMaxPending = 5000;
constexpr size_t kMaxHeartbeats = 64;

std::optional<StepKey> KeyIf(bool has, const v1::CheckpointRef& ref) {
  if (!has) return std::nullopt;
  return KeyOf(ref);
}

std::string Text(const std::optional<StepKey>& key) {
  return key ? absl::StrCat("generation ", key->first, " step ", key->second) : "the beginning";
}

// Ranks of a generation that a restored store does not know: the job waits for their end.
bool HoldsUnknown(const coordinator::State& state, const v1::JobRecord& job) {
  const auto is_one = [&job](const std::optional<coordinator::SlotHolder>& holder) {
    return holder && holder->job_id == job.id() && holder->generation > job.generation();
  };
  return std::any_of(state.nodes.begin(), state.nodes.end(), [&](const auto& node) {
    return std::any_of(node.second.slots.begin(), node.second.slots.end(),
                       [&](const Slot& slot) { return is_one(slot.holder) || is_one(slot.stray); });
  });
}

}  // namespace

Observer::Observer(Cluster& cluster) : cluster_(cluster), world_(cluster.world()) {}

void Observer::Violate(const Job& job, const std::string& what) {
  world_.Violate(absl::StrCat(job.record.id(), ": ", what));
}

// --- nodes ---

Observer::NodeView* Observer::OfSession(coordinator::SessionId session) {
  for (auto& [worker, node] : nodes_) {
    if (node.session == session) return &node;
  }
  return nullptr;
}

void Observer::NoteHello(const coordinator::HelloReceived& event) {
  const std::string& worker = event.hello.worker();
  const auto accepted = cluster_.state().worker_of_session.find(event.session);
  if (accepted == cluster_.state().worker_of_session.end()) return;
  NodeView& node = nodes_[worker];
  node.greeted = true;
  node.lost = false;
  node.leaving = event.hello.leaving();
  node.session = event.session;
  node.heard = cluster_.Now().boot;
}

// Before the step's placements are judged: what the event says is known to it.
void Observer::NoteNode(const coordinator::Event& event) {
  const BootTime now = cluster_.Now().boot;
  const auto heard = [&](coordinator::SessionId session) {
    NodeView* node = OfSession(session);
    if (node != nullptr) node->heard = now;
    return node;
  };
  const auto known = [&](const std::string& worker) {
    const auto found = nodes_.find(worker);
    return found == nodes_.end() ? nullptr : &found->second;
  };
  if (const auto* hello = std::get_if<coordinator::HelloReceived>(&event)) NoteHello(*hello);
  if (const auto* beat = std::get_if<coordinator::HeartbeatReceived>(&event)) {
    NodeView* node = heard(beat->session);
    if (node != nullptr && beat->heartbeat.leaving()) node->leaving = true;
  }
  if (const auto* e = std::get_if<coordinator::RankReported>(&event)) heard(e->session);
  if (const auto* e = std::get_if<coordinator::ProgressReceived>(&event)) heard(e->session);
  if (const auto* e = std::get_if<coordinator::SessionClosed>(&event)) {
    if (NodeView* node = OfSession(e->session)) node->session = 0;
  }
  if (const auto* e = std::get_if<coordinator::CordonReceived>(&event)) {
    if (NodeView* node = known(e->worker)) node->cordoned = true;
  }
  if (const auto* e = std::get_if<coordinator::DrainReceived>(&event)) {
    if (NodeView* node = known(e->worker)) node->cordoned = true;
  }
  if (const auto* e = std::get_if<coordinator::UncordonReceived>(&event)) {
    if (NodeView* node = known(e->worker)) node->cordoned = false;
  }
  if (const auto* e = std::get_if<coordinator::FenceNodeReceived>(&event)) {
    NodeView* node = known(e->worker);
    if (node != nullptr && !IsReady(e->worker)) {
      node->lost = true;
      node->greeted = false;
      node->session = 0;
    }
  }
  if (const auto* e = std::get_if<coordinator::ForgetNodeReceived>(&event)) {
    if (!cluster_.state().nodes.contains(e->worker)) nodes_.erase(e->worker);
  }
  if (!std::holds_alternative<coordinator::Tick>(event)) return;
  for (auto& [worker, node] : nodes_) {
    if (now - node.heard < cluster_.state().timing.Expiry()) continue;
    node.lost = true;
    node.greeted = false;
    node.session = 0;
  }
}

bool Observer::IsReady(const std::string& worker) const {
  const auto found = nodes_.find(worker);
  if (found == nodes_.end()) return false;
  const NodeView& node = found->second;
  return node.greeted && !node.lost && node.session != 0 &&
         cluster_.Now().boot - node.heard < cluster_.state().timing.SuspectAfter();
}

// --- the coordinator's steps ---

// After a restore: every known worker has said what it has seen, or is lost.
bool Observer::IsSettled() const {
  return std::all_of(nodes_.begin(), nodes_.end(),
                     [](const auto& known) { return known.second.greeted || known.second.lost; });
}

void Observer::OnRestored() {
  ledger_.clear();
  job_of_request_.clear();
  restored_ = ever_restored_ = true;
}

void Observer::OnLoaded() {
  seen_.clear();
  nodes_.clear();
  const coordinator::State& state = cluster_.state();
  for (const auto& [worker, node] : state.nodes) {
    nodes_[worker].heard = cluster_.Now().boot;
    nodes_[worker].cordoned = node.record.cordoned();
  }
  for (const auto& [id, told] : ledger_) {
    const auto found = state.jobs.find(id);
    const bool ended = told.end != v1::JOB_STATE_UNSPECIFIED;
    if (found == state.jobs.end()) {
      // One that ended last thing may have been dropped for newer ones.
      if (!ended && static_cast<int64_t>(state.ended.size()) < Cluster::kJobsKept) {
        world_.Violate(absl::StrCat(id, " was committed and is lost"));
      }
      continue;
    }
    const v1::JobRecord& record = found->second.record;
    if (ended && record.state() != told.end) {
      Violate(found->second, absl::StrCat("had ended as ", v1::JobState_Name(told.end), ", now ",
                                          v1::JobState_Name(record.state())));
    }
    if (record.generation() < told.generation) Violate(found->second, "lost a generation");
    const bool damaged =
        told.last_commit && cluster_.root()[id].ever_damaged.contains(*told.last_commit);
    if (!damaged && KeyIf(record.has_last_commit(), record.last_commit()) < told.last_commit) {
      Violate(found->second, "lost a commit");
    }
  }
  for (const auto& [id, job] : state.jobs) seen_[id] = ViewOf(job);
}

void Observer::Before(const coordinator::Event&) {
  commits_before_ = cluster_.state().tally.commits;
}

void Observer::After(const coordinator::Event& event, const coordinator::Actions& result) {
  NoteNode(event);
  std::set<std::string> changed;
  for (const coordinator::Batch& batch : result.batches) {
    for (const coordinator::Write& write : batch.writes) {
      if (absl::StartsWith(write.key, "job/")) changed.insert(write.key.substr(4));
    }
  }
  if (const auto* report = std::get_if<coordinator::RankReported>(&event)) {
    changed.insert(report->report.ref().fence().job_id());
  }
  const coordinator::State& state = cluster_.state();
  if (restored_ && !state.restored) {
    if (!IsSettled()) world_.Violate("the restored store does not know of every worker yet");
    restored_ = false;
  }
  int64_t newer = 0;
  for (const std::string& id : changed) {
    const auto job = state.jobs.find(id);
    if (job == state.jobs.end()) {
      seen_.erase(id);
      continue;
    }
    const std::optional<StepKey> before = seen_[id].last_commit;
    CheckJob(job->second);
    newer += seen_[id].last_commit != before;
  }
  if (state.tally.commits - commits_before_ > newer) {
    world_.Violate(
        absl::StrCat("a commit was counted twice: ", absl::StrJoin(changed, ", "), " changed"));
  }
  commits_before_ = state.tally.commits;
  if (const auto* report = std::get_if<coordinator::RankReported>(&event)) {
    const auto worker = state.worker_of_session.find(report->session);
    if (worker != state.worker_of_session.end()) CheckSlots(*cluster_.FindWorker(worker->second));
  }
  if (const auto* hello = std::get_if<coordinator::HelloReceived>(&event)) {
    CheckSlots(*cluster_.FindWorker(hello->hello.worker()));
  }
}

Observer::JobView Observer::ViewOf(const Job& job) {
  JobView view;
  const v1::JobRecord& record = job.record;
  view.state = record.state();
  view.intent = record.intent();
  view.generation = record.generation();
  view.retry_at_unix_millis = record.retry_at_unix_millis();
  view.last_commit = KeyIf(record.has_last_commit(), record.last_commit());
  if (!job.attempt) return view;
  const v1::AttemptRecord& attempt = job.attempt->record;
  for (const v1::RankRecord& rank : attempt.ranks()) view.ranks.push_back(rank.state());
  view.resume_decided = attempt.resume_decided();
  view.resume = KeyIf(attempt.has_resume(), attempt.resume());
  return view;
}

void Observer::CheckJob(const Job& job) {
  JobView& seen = seen_[job.record.id()];
  CheckTransition(job, seen);
  CheckBudgets(job);
  if (job.attempt) {
    CheckRanks(job, seen);
    CheckCheckpoints(job, seen);
  }
  seen = ViewOf(job);
}

void Observer::CheckTransition(const Job& job, const JobView& before) {
  const v1::JobRecord& record = job.record;
  if (coordinator::IsTerminal(before.state) && record.state() != before.state) {
    Violate(job, absl::StrCat("had ended as ", v1::JobState_Name(before.state), ", now ",
                              v1::JobState_Name(record.state())));
  }
  if (record.generation() < before.generation) Violate(job, "went back to a lower generation");
  const bool was_stopping = before.state == v1::JOB_STATE_STOPPING;
  const bool placed = record.generation() > before.generation;
  if (was_stopping && record.state() == v1::JOB_STATE_STOPPING && !placed &&
      record.intent() < before.intent) {
    Violate(job, absl::StrCat("intent fell from ", v1::StopIntent_Name(before.intent), " to ",
                              v1::StopIntent_Name(record.intent())));
  }
  if (before.intent == v1::STOP_INTENT_CANCEL && !placed &&
      record.state() != v1::JOB_STATE_STOPPING && record.state() != v1::JOB_STATE_CANCELLED &&
      record.state() != v1::JOB_STATE_SUCCEEDED) {
    Violate(job, absl::StrCat("was cancelled and is ", v1::JobState_Name(record.state())));
  }
  if (placed) CheckPlaced(job, before);
  if (record.state() == v1::JOB_STATE_PLANNING && before.state == v1::JOB_STATE_STOPPING) {
    CheckPlannedAgain(job);
  }
  const bool active = coordinator::IsTerminal(record.state()) == false &&
                      record.state() != v1::JOB_STATE_QUEUED &&
                      record.state() != v1::JOB_STATE_PLANNING;
  const bool was_active = was_stopping || before.state == v1::JOB_STATE_STARTING ||
                          before.state == v1::JOB_STATE_RUNNING;
  if (was_active && !active && !placed) CheckClosed(job);
  if (record.state() == v1::JOB_STATE_SUCCEEDED && before.state != v1::JOB_STATE_SUCCEEDED) {
    CheckSucceeded(job);
  }
  if (record.state() == v1::JOB_STATE_FAILED && before.state != v1::JOB_STATE_FAILED) {
    CheckFailed(job);
  }
  if (record.state() == v1::JOB_STATE_RUNNING && before.state != v1::JOB_STATE_RUNNING) {
    const auto gang = cluster_.gangs().find(job.attempt->record.nonce());
    if (gang == cluster_.gangs().end()) return Violate(job, "runs and was never launched");
    if (gang->second->wrong_hash_rank >= 0) Violate(job, "runs two plans");
  }
}

// Only because a rank of it said why, once in its life.
void Observer::CheckPlannedAgain(const Job& job) {
  if (!job.record.has_measured()) Violate(job, "is planned again and nothing was measured");
  if (job.plan->has_measured()) Violate(job, "is planned a third time");
  const bool fell_short =
      std::any_of(cluster_.gangs().begin(), cluster_.gangs().end(), [&](const auto& gang) {
        return gang.second->job_id == job.record.id() && gang.second->short_rank >= 0;
      });
  if (!fell_short) Violate(job, "is planned again and no plan of it fell short");
}

// --- placing ---

void Observer::CheckPlaced(const Job& job, const JobView& before) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  if (job.record.held()) Violate(job, "is held and was placed");
  if (cluster_.Now().unix_millis < before.retry_at_unix_millis) {
    Violate(job,
            absl::StrCat("was placed ", before.retry_at_unix_millis - cluster_.Now().unix_millis,
                         " ms before its back-off ended"));
  }
  for (int r = 0; r < attempt.ranks_size(); ++r) {
    const v1::RankRecord& rank = attempt.ranks(r);
    const std::string where =
        absl::StrCat("rank ", r, " was placed on ", rank.worker(), " slot ", rank.slot());
    if (!IsReady(rank.worker())) Violate(job, absl::StrCat(where, ", which is silent"));
    if (nodes_[rank.worker()].cordoned) Violate(job, absl::StrCat(where, ", which is cordoned"));
    if (nodes_[rank.worker()].leaving) Violate(job, absl::StrCat(where, ", which leaves"));
    if (cluster_.FindWorker(rank.worker())->LiveIn(rank.slot()) != nullptr) {
      Violate(job, absl::StrCat(where, ", where another rank lives"));
    }
  }
  if (restored_ && !IsSettled()) {
    Violate(job, "was placed before the restored store knew of every worker");
  }
  for (const auto& [nonce, gang] : cluster_.gangs()) {
    if (gang->job_id != job.record.id() || gang->generation >= attempt.generation()) continue;
    const bool whole =
        std::all_of(gang->members.begin(), gang->members.end(), [](const Trainer* member) {
          return member != nullptr && (member->can_run() || member->finished());
        });
    const bool any = std::any_of(gang->members.begin(), gang->members.end(),
                                 [](const Trainer* m) { return m != nullptr && m->can_run(); });
    if (whole && any) {
      Violate(job, absl::StrCat("generation ", attempt.generation(), " was placed while ",
                                gang->generation, " lives"));
    }
  }
  CheckOrder(job);
}

// Nobody that could have been placed stands before it.
void Observer::CheckOrder(const Job& placed) {
  const coordinator::State& state = cluster_.state();
  int64_t slots = 0;
  for (const auto& [worker, node] : state.nodes) {
    const NodeView& view = nodes_[worker];
    if (!IsReady(worker) || view.cordoned || view.leaving) continue;
    slots += std::count_if(node.slots.begin(), node.slots.end(), [](const Slot& slot) {
      return !slot.holder || !slot.holder->quarantined;
    });
  }
  for (const auto& [key, id] : state.queue) {
    if (key > coordinator::KeyOf(placed.record)) break;
    const Job& other = state.jobs.at(id);
    if (other.record.held() || cluster_.Now().boot < other.retry_at) continue;
    if (HoldsUnknown(state, other.record)) continue;
    if (slots < other.record.spec().parallel().ranks()) continue;
    Violate(placed, absl::StrCat("overtook ", id));
  }
}

// --- ending ---

// A generation is closed when it cannot go on, and no rank of it lives where one can ask.
void Observer::CheckClosed(const Job& job) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const v1::JobState state = job.record.state();
  const bool whole_proof = state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_CANCELLED;
  const auto gang = cluster_.gangs().find(attempt.nonce());
  bool any_alive = false;
  bool dead = false;
  for (int r = 0; r < attempt.ranks_size(); ++r) {
    const v1::RankRecord& rank = attempt.ranks(r);
    const WorkerMachine* worker = cluster_.FindWorker(rank.worker());
    const Trainer* tree = worker->Find(attempt.nonce(), r);
    const bool presumed = rank.state() == v1::RANK_STATE_PRESUMED_GONE;
    const bool alive = tree != nullptr && (!presumed || tree->can_run());
    any_alive |= alive;
    if (alive && whole_proof) {
      Violate(job, absl::StrCat("ended and rank ", r, " lives on ", rank.worker()));
    }
    if (rank.state() < v1::RANK_STATE_GONE && IsReady(rank.worker())) {
      Violate(job, absl::StrCat("was closed without proof of rank ", r, " on ", rank.worker(),
                                ", which answers"));
    }
    const Trainer* member = gang == cluster_.gangs().end() ? nullptr : gang->second->members[r];
    // That one has finished is unknown once its worker restarted before it could tell, or what it
    // told came after the backup: it counts as unfinished and gone, and what the others still write
    // for it is the older generation's.
    const bool untold = member != nullptr &&
                        (member->outlived_daemon() || (ever_restored_ && !rank.has_exit_code()));
    if (!alive && (member == nullptr || !member->finished() || untold)) dead = true;
  }
  if (any_alive && !dead) Violate(job, "was closed while its generation lives");
}

void Observer::CheckSucceeded(const Job& job) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const auto gang = cluster_.gangs().find(attempt.nonce());
  if (gang == cluster_.gangs().end()) return Violate(job, "succeeded and was never launched");
  for (const Trainer* member : gang->second->members) {
    if (member == nullptr || !member->finished()) {
      return Violate(job, "succeeded and a rank did not");
    }
  }
  if (gang->second->folder == nullptr) return;
  const int64_t steps = gang->second->steps();
  const auto& committed = gang->second->folder->ever_committed;
  const bool final = std::any_of(committed.begin(), committed.end(), [&](const StepKey& key) {
    return key.second == steps && key.first <= attempt.generation();
  });
  if (!final) Violate(job, "succeeded without its last checkpoint");
}

void Observer::CheckFailed(const Job& job) {
  if (!job.attempt || !absl::StrContains(job.record.cause().message(), "the plan's hash")) return;
  const auto gang = cluster_.gangs().find(job.attempt->record.nonce());
  if (gang == cluster_.gangs().end() || gang->second->wrong_hash_rank < 0) {
    Violate(job, "failed for a plan hash that nobody computed");
  }
}

void Observer::CheckBudgets(const Job& job) {
  const v1::RestartSpec& budgets = job.record.spec().restarts();
  const v1::RestartCounts& counts = job.record.restarts();
  if (counts.infrastructure() > budgets.infrastructure() ||
      counts.application() > budgets.application() ||
      counts.no_progress() > budgets.no_progress()) {
    Violate(job, absl::StrCat("restarts ", counts.ShortDebugString(), " exceed ",
                              budgets.ShortDebugString()));
  }
}

// --- ranks and checkpoints ---

void Observer::CheckRanks(const Job& job, const JobView& before) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const bool same = before.generation == attempt.generation() &&
                    before.ranks.size() == static_cast<size_t>(attempt.ranks_size());
  for (int r = 0; r < attempt.ranks_size(); ++r) {
    const v1::RankRecord& rank = attempt.ranks(r);
    const v1::RankState was = same ? before.ranks[r] : v1::RANK_STATE_UNSPECIFIED;
    const bool proven_late =
        was == v1::RANK_STATE_PRESUMED_GONE && rank.state() == v1::RANK_STATE_GONE;
    if (rank.state() < was && !proven_late) {
      Violate(job, absl::StrCat("rank ", r, " went from ", v1::RankState_Name(was), " back to ",
                                v1::RankState_Name(rank.state())));
    }
    if (rank.state() < v1::RANK_STATE_GONE) continue;
    const Trainer* tree = cluster_.FindWorker(rank.worker())->Find(attempt.nonce(), r);
    const bool presumed = rank.state() == v1::RANK_STATE_PRESUMED_GONE;
    if (tree != nullptr && (!presumed || tree->can_run())) {
      Violate(job, absl::StrCat("rank ", r, " is ", v1::RankState_Name(rank.state()),
                                " and lives on ", rank.worker()));
    }
  }
}

void Observer::CheckCheckpoints(const Job& job, const JobView& before) {
  const v1::AttemptRecord& attempt = job.attempt->record;
  const std::optional<StepKey> resume = KeyIf(attempt.has_resume(), attempt.resume());
  const bool same = before.generation == attempt.generation();
  if (resume && resume->first >= attempt.generation()) {
    Violate(job, absl::StrCat("generation ", attempt.generation(), " goes on from ", Text(resume)));
  }
  if (same && before.resume_decided && resume != before.resume) {
    Violate(job, absl::StrCat("resume changed from ", Text(before.resume), " to ", Text(resume)));
  }
  if (attempt.resume_decided() && !(same && before.resume_decided)) {
    const std::optional<StepKey> committed = before.last_commit;
    const JobFolder& folder = cluster_.root()[job.record.id()];
    // What a restored store calls committed may have been deleted for what is newer.
    const bool superseded = ever_restored_ && committed && !folder.IsWhole(*committed);
    if (committed && !superseded && !folder.ever_damaged.contains(*committed) &&
        (!resume || resume->second < committed->second)) {
      Violate(job,
              absl::StrCat("goes on from ", Text(resume), ", committed was ", Text(committed)));
    }
  }
  const std::optional<StepKey> commit =
      KeyIf(job.record.has_last_commit(), job.record.last_commit());
  // Back only to what it goes on from, which was judged above.
  if (commit < before.last_commit && commit != resume) {
    Violate(job, absl::StrCat("commit went back to ", Text(commit)));
  }
  if (commit && !cluster_.root()[job.record.id()].ever_committed.contains(*commit)) {
    Violate(job, absl::StrCat("committed ", Text(commit), ", which nobody wrote"));
  }
}

// --- slots ---

void Observer::CheckSlots(const WorkerMachine& worker) {
  if (!cluster_.up()) return;
  const coordinator::State& state = cluster_.state();
  const auto found = state.nodes.find(worker.name());
  if (found == state.nodes.end()) return;
  const Node& node = found->second;
  for (const auto& [key, tree] : worker.trees()) {
    if (tree->slot() >= static_cast<int>(node.slots.size())) continue;
    const Slot& slot = node.slots[tree->slot()];
    if (StateOf(state, node, slot, cluster_.Now().boot) == v1::SLOT_STATE_FREE) {
      world_.Violate(absl::StrCat("slot ", tree->slot(), " of ", worker.name(),
                                  " is FREE and rank ", key.rank, " of ", tree->gang().job_id,
                                  " generation ", tree->gang().generation, " lives in it"));
    }
  }
}

void Observer::OnLaunched(const WorkerMachine& worker, const Trainer&) { CheckSlots(worker); }

void Observer::OnWorkerStepped(const WorkerMachine& worker) {
  const worker::State& state = worker.state();
  const size_t slots = static_cast<size_t>(worker.num_slots());
  if (state.ranks.size() > 16 + 8 * slots || state.heartbeats.size() > kMaxHeartbeats ||
      state.reports.size() > 1024) {
    world_.Violate(absl::StrCat(worker.name(), " remembers ", state.ranks.size(), " ranks, ",
                                state.heartbeats.size(), " heartbeats, ", state.reports.size(),
                                " reports"));
  }
}

void Observer::CheckBounds() {
  const coordinator::State& state = cluster_.state();
  size_t slots = 0;
  for (const auto& [worker, node] : state.nodes) slots += node.slots.size();
  for (const auto& [id, job] : state.jobs) {
    if (job.earlier.size() > slots || job.record.events_size() > 64 ||
        job.record.attempts_size() > 16) {
      Violate(job, absl::StrCat("keeps ", job.earlier.size(), " earlier attempts, ",
                                job.record.events_size(), " events, ", job.record.attempts_size(),
                                " summaries"));
    }
  }
  if (state.worker_of_session.size() > 2 * state.nodes.size() + 8) {
    world_.Violate("sessions are not forgotten");
  }
  if (world_.pending() > kMaxPending) world_.Violate("more and more is under way");
}

void Observer::CheckAll() {
  if (!cluster_.up()) return;
  for (const auto& [id, job] : cluster_.state().jobs) CheckJob(job);
  for (const auto& worker : cluster_.workers()) CheckSlots(*worker);
  CheckBounds();
}

// --- what left ---

void Observer::OnDurable(const v1::Job& job) {
  Ledger& told = ledger_[job.id()];
  if (told.end != v1::JOB_STATE_UNSPECIFIED && job.state() != told.end) {
    world_.Violate(absl::StrCat(job.id(), " had ended as ", v1::JobState_Name(told.end), ", now ",
                                v1::JobState_Name(job.state())));
  }
  if (coordinator::IsTerminal(job.state())) told.end = job.state();
  told.generation = std::max(told.generation, job.generation());
  told.last_commit = KeyIf(job.has_last_commit(), job.last_commit());
}

void Observer::OnReplied(const v1::Job& job) {
  if (cluster_.disk().Find(absl::StrCat("job/", job.id())) == nullptr &&
      !coordinator::IsTerminal(job.state())) {
    world_.Violate(absl::StrCat("replied about ", job.id(), " before it was durable"));
  }
}

void Observer::OnSubmitted(const std::string& request_id, const std::string& job_id) {
  const auto [known, fresh] = job_of_request_.emplace(request_id, job_id);
  if (!fresh && known->second != job_id) {
    world_.Violate(absl::StrCat("request ", request_id, " made ", known->second, " and ", job_id));
  }
}

// Orders leave after what they rest on is durable.
void Observer::OnSent(const v1::CoordinatorMessage& message) {
  if (!message.has_start() && !message.has_peers()) return;
  const v1::Fence& fence =
      message.has_start() ? message.start().ref().fence() : message.peers().fence();
  const std::string* stored =
      cluster_.disk().Find(absl::StrCat("attempt/", fence.job_id(), "/", fence.generation()));
  v1::AttemptRecord attempt;
  if (stored == nullptr || !attempt.ParseFromString(*stored) || attempt.nonce() != fence.nonce()) {
    // What is over by now left before.
    const auto job = cluster_.state().jobs.find(fence.job_id());
    if (job == cluster_.state().jobs.end() ||
        job->second.record.generation() > fence.generation()) {
      return;
    }
    return world_.Violate(absl::StrCat("an order for ", fence.job_id(), " generation ",
                                       fence.generation(), " left before its attempt was durable"));
  }
  if (!message.has_peers()) return;
  const std::optional<StepKey> said = KeyIf(message.peers().has_resume(), message.peers().resume());
  if (!attempt.resume_decided() || KeyIf(attempt.has_resume(), attempt.resume()) != said) {
    world_.Violate(absl::StrCat(fence.job_id(), " was told to go on from ", Text(said),
                                ", which is not committed"));
  }
}

void Observer::AddFired(const coordinator::State& state,
                        std::array<int64_t, coordinator::kNumRows>& fired) const {
  for (size_t row = 0; row < fired.size(); ++row) fired[row] += state.transitions.fired[row];
}

}  // namespace upipe::sim
