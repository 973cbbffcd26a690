#include "tests/sim/coordinator/cluster.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "coordinator/core/step.h"
#include "tests/support/coordinator/core_driver.h"

namespace upipe::coordinator {
namespace {

constexpr int kWorkers = 4;
constexpr int kMaxViolations = 5;

}  // namespace

Cluster::Cluster(uint64_t seed)
    : random_(seed),
      timing_{.heartbeat = absl::Milliseconds(200),
              .kill_bound = absl::Seconds(2),
              .autonomy = absl::Seconds(3),
              .margin = absl::Seconds(1),
              .start_deadline = absl::Seconds(5)} {
  for (size_t w = 0; w < kWorkers; ++w) {
    workers_.push_back(std::make_unique<SimulatedWorker>(
        SimulatedWorker::World{random_, [this] { return now_; },
                               [this](absl::Duration delay, std::function<void()> run) {
                                 After(delay, std::move(run));
                               },
                               [this](std::string text) { Violation(text); }, &faults_},
        timing_, absl::StrCat("w", w), 1 + static_cast<int>(random_() % 3)));
    partitioned_until_.push_back(absl::ZeroDuration());
    After(Delay(), [this, w] { Dial(w); });
    After(Delay(), [this, w] { Beat(w); });
  }
  BootCoordinator();
  After(absl::ZeroDuration(), [this] { Tick(); });
  After(absl::Seconds(1), [this] { InjectFault(); });
  After(Delay(), [this] { SubmitOrCancel(); });
}

Cluster::Outcome Cluster::Run(absl::Duration faulty) {
  const absl::Duration patience = faulty + 20 * timing_.Expiry() + absl::Minutes(4);
  while (outcome_.violations.empty()) {
    if (faults_ && now_ >= faulty) {
      faults_ = false;
      if (!state_) BootCoordinator();
    }
    if (!faults_ && AllEnded()) break;
    if (now_ > patience) {
      for (const auto& [id, job] : state_->jobs) {
        if (IsTerminal(job.record.state())) continue;
        Violation(absl::StrCat(id, " never ended: ", v1::JobState_Name(job.record.state()), ", ",
                               job.reason));
      }
      if (outcome_.violations.empty()) Violation("a slot never became free");
      break;
    }
    auto next = queue_.begin();
    now_ = std::max(now_, next->first.first);
    const std::function<void()> run = std::move(next->second);
    queue_.erase(next);
    run();
    ++outcome_.events;
    CheckInvariants();
  }
  for (const auto& [id, state] : ended_) {
    if (state == v1::JOB_STATE_SUCCEEDED) ++outcome_.succeeded;
    if (state == v1::JOB_STATE_FAILED) ++outcome_.failed;
    if (state == v1::JOB_STATE_CANCELLED) ++outcome_.cancelled;
  }
  return outcome_;
}

void Cluster::Violation(const std::string& text) {
  if (outcome_.violations.size() >= kMaxViolations) return;
  outcome_.violations.push_back(absl::StrCat("at ", absl::FormatDuration(now_), ": ", text));
}

// --- coordinator ---

void Cluster::BootCoordinator() {
  Actions actions;
  absl::StatusOr<State> state = LoadState(
      store_, {timing_, [this] { return absl::StrCat("nonce", ++nonces_); }}, Now(), &actions);
  UPIPE_CHECK_OK(state.status());
  UPIPE_CHECK_OK(store_.Commit(actions.batches).status());
  state_ = *std::move(state);
  ++life_;
}

// Of what was decided and not yet reported durable, any prefix may have reached the disk.
void Cluster::CrashCoordinator() {
  ++outcome_.coordinator_crashes;
  while (!pending_.empty() && Chance(50)) {
    UPIPE_CHECK_OK(store_.Commit(pending_.front().batches).status());
    pending_.pop_front();
  }
  pending_.clear();
  commit_due_ = false;
  state_.reset();
  ++life_;
  for (auto& [id, session] : sessions_) Break(id);
  After(absl::Milliseconds(random_() % 8000), [this] {
    if (!state_) BootCoordinator();
  });
}

void Cluster::Decide(const Event& event) {
  if (!state_) return;
  Actions result = Step(*state_, event, Now());
  pending_.push_back({std::move(result.batches), std::move(result.actions)});
  if (commit_due_) return;
  commit_due_ = true;
  After(absl::Milliseconds(random_() % 10), [this, life = life_] {
    if (life == life_) CommitSome();
  });
}

void Cluster::CommitSome() {
  commit_due_ = false;
  while (!pending_.empty()) {
    Pending next = std::move(pending_.front());
    pending_.pop_front();
    UPIPE_CHECK_OK(store_.Commit(next.batches).status());
    Release(std::move(next.actions));
  }
}

void Cluster::Release(std::vector<Action> actions) {
  for (Action& action : actions) {
    std::visit([this](auto& a) { Carry(a); }, action);
  }
}

void Cluster::Carry(ReplyJob& action) {
  if (!action.job.ok()) return;
  if (store_.List(absl::StrCat("job/", (*action.job)->id()))->empty()) {
    Violation(absl::StrCat("replied about ", (*action.job)->id(), " before it was durable"));
  }
}

void Cluster::Carry(SendToWorker& action) {
  if (action.message.has_start()) {
    const v1::Fence& fence = action.message.start().ref().fence();
    const auto attempts =
        store_.List(absl::StrCat("attempt/", fence.job_id(), "/", fence.generation()));
    v1::AttemptRecord attempt;
    if (attempts->empty() || !attempt.ParseFromString(attempts->front().value) ||
        attempt.nonce() != fence.nonce()) {
      Violation(absl::StrCat("Start of ", fence.job_id(), " left before its attempt was durable"));
    }
  }
  const auto found = sessions_.find(action.session);
  if (found == sessions_.end() || found->second.broken) return;
  Session& session = found->second;
  const absl::Duration arrival =
      std::max({session.last_down, now_ + Delay(), partitioned_until_[session.worker]});
  session.last_down = arrival;
  const int copies = Chance(3) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    After(arrival - now_, [this, id = action.session, message = action.message] {
      const Session& at = sessions_.at(id);
      if (!at.broken) workers_[at.worker]->Receive(message);
    });
  }
}

void Cluster::Carry(StartPlanner& action) {
  const int ranks = action.spec.parallel().ranks();
  After(Delay(), [this, life = life_, ranks, id = action.job_id] {
    if (life != life_) return;
    if (faults_ && Chance(10)) return Decide(PlanFinished{id, absl::InternalError("crash")});
    Decide(PlanFinished{id, PlanOf(ranks)});
  });
}

// --- network ---

void Cluster::Dial(size_t w) {
  SimulatedWorker& worker = *workers_[w];
  if (!worker.up() || worker.connected()) return;
  if (!state_) return After(absl::Milliseconds(200), [this, w] { Dial(w); });
  const SessionId id = next_session_++;
  sessions_[id].worker = w;
  worker.Connect([this, id](v1::WorkerMessage message) { Up(id, std::move(message)); });
}

void Cluster::Up(SessionId id, v1::WorkerMessage message) {
  Session& session = sessions_.at(id);
  const absl::Duration arrival =
      std::max({session.last_up, now_ + Delay(), partitioned_until_[session.worker]});
  session.last_up = arrival;
  const int copies = Chance(3) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    After(arrival - now_, [this, id, message, life = life_] {
      if (sessions_.at(id).broken || life != life_) return;
      if (message.has_hello()) Decide(HelloReceived{id, message.hello()});
      if (message.has_heartbeat()) Decide(HeartbeatReceived{id, message.sequence()});
      if (message.has_rank()) Decide(RankReported{id, message.sequence(), message.rank()});
    });
  }
}

// Both ends notice in their own time; what is under way is lost.
void Cluster::Break(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.broken) return;
  found->second.broken = true;
  ++outcome_.breaks;
  const size_t w = found->second.worker;
  workers_[w]->Disconnect();
  After(Delay(), [this, w] { Dial(w); });
  After(Chance(70) ? Delay() : absl::Seconds(4), [this, id, life = life_] {
    if (life == life_) Decide(SessionClosed{id});
  });
}

// --- time, faults, clients ---

void Cluster::Beat(size_t w) {
  workers_[w]->Beat();
  After(timing_.heartbeat, [this, w] { Beat(w); });
}

void Cluster::Tick() {
  Decide(coordinator::Tick{});
  After(absl::Milliseconds(50), [this] { Tick(); });
}

void Cluster::InjectFault() {
  if (!faults_) return;
  After(absl::Milliseconds(random_() % 4000), [this] { InjectFault(); });
  const size_t w = random_() % kWorkers;
  switch (random_() % 6) {
    case 0:
      if (state_) CrashCoordinator();
      return;
    case 1: {
      if (!workers_[w]->up()) return;
      ++outcome_.worker_crashes;
      workers_[w]->Crash();
      for (auto& [id, session] : sessions_) {
        if (session.worker == w) Break(id);
      }
      After(absl::Milliseconds(random_() % 10000), [this, w] {
        workers_[w]->Boot();
        Dial(w);
      });
      return;
    }
    case 2:
      partitioned_until_[w] = now_ + absl::Milliseconds(random_() % 9000);
      return;
    default:
      for (auto& [id, session] : sessions_) {
        if (session.worker == w) Break(id);
      }
  }
}

void Cluster::SubmitOrCancel() {
  if (!faults_) return;
  After(absl::Milliseconds(random_() % 3000), [this] { SubmitOrCancel(); });
  if (Chance(20) && state_ && !state_->jobs.empty()) {
    auto job = state_->jobs.begin();
    std::advance(job, random_() % state_->jobs.size());
    return Decide(CancelReceived{1, job->first});
  }
  // A client repeats its last request now and then, as after a lost reply.
  if (!Chance(10)) ++requests_;
  Decide(SubmitReceived{1, absl::StrCat("job", requests_, "-", random_() % 1000),
                        absl::StrCat("request", requests_), SpecOf(1 + random_() % 6)});
}

bool Cluster::AllEnded() {
  if (!state_) return false;
  for (const auto& [id, job] : state_->jobs) {
    if (!IsTerminal(job.record.state())) return false;
  }
  for (const auto& [name, node] : state_->nodes) {
    for (const Slot& slot : node.slots) {
      if (StateOf(*state_, node, slot, Now().boot) != v1::SLOT_STATE_FREE) return false;
    }
  }
  return pending_.empty();
}

// --- invariants ---

void Cluster::CheckInvariants() {
  if (!state_) return;
  CheckSlots();
  CheckJobs();
}

void Cluster::CheckSlots() {
  for (const auto& worker : workers_) {
    const auto found = state_->nodes.find(worker->name());
    if (found == state_->nodes.end()) continue;
    const Node& node = found->second;
    for (size_t s = 0; s < node.slots.size(); ++s) {
      if (StateOf(*state_, node, node.slots[s], Now().boot) != v1::SLOT_STATE_FREE) continue;
      if (worker->IsSlotAlive(s)) {
        Violation(
            absl::StrCat("slot ", s, " of ", worker->name(), " is FREE and a rank lives in it"));
      }
    }
  }
}

void Cluster::CheckJobs() {
  for (const auto& [id, job] : state_->jobs) {
    const auto ended = ended_.find(id);
    // What is decided but not durable may be lost with the coordinator: only what the store holds
    // is final.
    if (ended != ended_.end() && ended->second != job.record.state()) {
      Violation(absl::StrCat(id, " had ended as ", v1::JobState_Name(ended->second), ", now ",
                             v1::JobState_Name(job.record.state())));
    }
    if (IsTerminal(job.record.state()) && pending_.empty()) ended_[id] = job.record.state();
    if (!job.attempt) continue;
    const v1::AttemptRecord& attempt = job.attempt->record;
    for (int r = 0; r < attempt.ranks_size(); ++r) {
      const v1::RankRecord& rank = attempt.ranks(r);
      for (const auto& worker : workers_) {
        if (worker->name() != rank.worker()) continue;
        if (rank.state() >= v1::RANK_STATE_GONE && worker->IsAlive(attempt.nonce(), r)) {
          Violation(absl::StrCat("rank ", r, " of ", id, " is ", v1::RankState_Name(rank.state()),
                                 " and lives"));
        }
        if (job.record.state() == v1::JOB_STATE_SUCCEEDED &&
            !worker->ExitedZero(attempt.nonce(), r)) {
          Violation(absl::StrCat(id, " succeeded and rank ", r, " did not"));
        }
      }
      if (IsTerminal(job.record.state()) || !HoldsSlot(rank)) continue;
      const auto& holder = state_->nodes.at(rank.worker()).slots.at(rank.slot()).holder;
      if (!holder || holder->job_id != id) {
        Violation(absl::StrCat("rank ", r, " of ", id, " is not gone and holds no slot"));
      }
    }
  }
}

}  // namespace upipe::coordinator
