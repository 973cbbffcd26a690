#include "tests/sim/system/cluster.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "tests/sim/system/clients.h"
#include "tests/sim/system/faults.h"
#include "tests/sim/system/observer.h"

namespace upipe::sim {
namespace {

using coordinator::Event;
using coordinator::State;

constexpr size_t kWorkers = 4;
constexpr absl::Duration kFaulty = absl::Seconds(40);
constexpr absl::Duration kPatience = absl::Minutes(5);  // for what is left when faults end
constexpr int64_t kCheckedWholly = 100;                 // steps

coordinator::Timing ShortTiming() {
  coordinator::Timing timing;
  timing.heartbeat = absl::Milliseconds(500);
  timing.kill_bound = absl::Seconds(2);
  timing.autonomy = absl::Seconds(4);
  timing.margin = absl::Seconds(1);
  timing.start_deadline = absl::Seconds(4);
  timing.backoff_first = absl::Milliseconds(200);
  timing.backoff_longest = absl::Seconds(2);
  timing.stall_floor = absl::Seconds(2);
  timing.settle = absl::Milliseconds(1500);
  timing.drain_grace = absl::Seconds(3);
  return timing;
}

}  // namespace

Cluster::Cluster(const Options& options)
    : world_(options.seed, options.verbose), broken_(options.broken), timing_(ShortTiming()) {
  machine_.clock_base = absl::Hours(static_cast<int64_t>(1 + world_.Random(1000)));
  actor_.machine = &machine_;
  for (size_t w = 0; w < kWorkers; ++w) {
    workers_.push_back(
        std::make_unique<WorkerMachine>(world_, *this, w, 1 + static_cast<int>(world_.Random(3))));
  }
  link_of_worker_.resize(kWorkers);
  blocked_up_.resize(kWorkers);
  blocked_down_.resize(kWorkers);
  observer_ = std::make_unique<Observer>(*this);
  clients_ = std::make_unique<Clients>(*this);
  faults_ = std::make_unique<Faults>(*this);
}

Cluster::~Cluster() = default;

Outcome Cluster::Run() {
  BootCoordinator();
  for (auto& worker : workers_) {
    world_.After(world_.Millis(0, 300), [w = worker.get()] { w->Boot(); });
  }
  clients_->Begin();
  faults_->Begin();
  int64_t checked_at = 0;
  bool faulty = true;
  while (world_.violations().empty()) {
    if (faulty && world_.now() >= kFaulty) {
      faulty = false;
      EndFaults();
    }
    if (!faulty && AllEnded()) break;
    if (world_.now() > kFaulty + kPatience) {
      DescribeUnended();
      break;
    }
    world_.RunOne();
    if (world_.num_steps() < checked_at + kCheckedWholly) continue;
    checked_at = world_.num_steps();
    observer_->CheckAll();
  }
  if (world_.violations().empty()) observer_->CheckAll();
  if (state_) observer_->AddFired(*state_, outcome_.fired);
  outcome_.violations = world_.violations();
  outcome_.steps = world_.num_steps();
  outcome_.faults = world_.num_faults();
  outcome_.digest = world_.digest();
  return outcome_;
}

void Cluster::EndFaults() {
  world_.StopFaults();
  if (!state_ && !booting_) BootCoordinator();
  for (auto& worker : workers_) {
    if (worker->up() && !worker->has_all_slots()) worker->CrashDaemon();
    if (!worker->up()) world_.After(world_.Millis(0, 500), [w = worker.get()] { w->Boot(); });
  }
}

bool Cluster::AllEnded() const {
  if (!state_ || !pending_.empty() || clients_->waiting()) return false;
  if (!state_->unplanned.empty() || !state_->queue.empty() || !state_->active.empty()) return false;
  for (const auto& worker : workers_) {
    if (!worker->trees().empty()) return false;
  }
  for (const auto& [name, node] : state_->nodes) {
    for (const coordinator::Slot& slot : node.slots) {
      if (StateOf(*state_, node, slot, Now().boot) != v1::SLOT_STATE_FREE) return false;
    }
  }
  return true;
}

void Cluster::DescribeUnended() {
  if (!state_) return world_.Violate("the coordinator did not come back");
  for (const auto& [id, job] : state_->jobs) {
    if (coordinator::IsTerminal(job.record.state())) continue;
    world_.Violate(absl::StrCat(id, " never ended: ", v1::JobState_Name(job.record.state()), ", ",
                                job.reason));
  }
  for (const auto& worker : workers_) {
    for (const auto& [key, tree] : worker->trees()) {
      world_.Violate(absl::StrCat("rank ", key.rank, " of ", tree->gang().job_id, " generation ",
                                  tree->gang().generation, " still lives on ", worker->name()));
    }
  }
  if (world_.violations().empty()) world_.Violate("a slot never became free");
}

const WorkerMachine* Cluster::FindWorker(const std::string& name) const {
  for (const auto& worker : workers_) {
    if (worker->name() == name) return worker.get();
  }
  return nullptr;
}

// --- the coordinator ---

coordinator::Moment Cluster::Now() const {
  const BootTime boot = machine_.Clock(world_.now());
  return {boot, absl::ToInt64Milliseconds(boot.since_boot)};
}

void Cluster::BootCoordinator() {
  booting_ = false;
  coordinator::Actions actions;
  coordinator::LoadOptions options;
  options.timing = timing_;
  options.new_nonce = [this] { return absl::StrCat("nonce", ++nonces_); };
  options.retention.jobs = kJobsKept;
  absl::StatusOr<State> state = LoadState(disk_, options, Now(), &actions);
  if (!state.ok()) return world_.Violate(absl::StrCat("load: ", state.status().message()));
  UPIPE_CHECK_OK(disk_.Commit(actions.batches).status());
  state_ = *std::move(state);
  state_->transitions.broken = broken_;
  observer_->OnLoaded();
  world_.After(actor_, absl::Milliseconds(50), [this] { Tick(); });
}

void Cluster::CrashCoordinator(absl::Duration down_for) {
  if (!state_) return;
  while (!pending_.empty() && world_.Chance(50)) {
    if (!disk_.Commit(pending_.front().batches).ok()) break;
    pending_.pop_front();
  }
  pending_.clear();
  commit_due_ = false;
  calls_.clear();
  greeted_.clear();
  observer_->AddFired(*state_, outcome_.fired);
  state_.reset();
  actor_.End();
  actor_.stopped_until = Time();
  for (auto& [id, link] : links_) {
    if (link.dead) continue;
    link.dead = true;
    // A machine that vanishes says nothing.
    if (world_.Chance(80)) TellWorkerClosed(link, Delay(), "the coordinator ended");
  }
  links_.clear();
  booting_ = true;
  world_.After(actor_, down_for, [this] { BootCoordinator(); });
}

void Cluster::RestoreBackup() {
  if (!state_ || !backup_) return;
  CrashCoordinator(world_.Millis(100, 3000));
  disk_ = *backup_;
  disk_.MarkRestored();
  backup_.reset();
  ++restores_;
  observer_->OnRestored();
}

void Cluster::Tick() {
  Decide(coordinator::Tick{});
  world_.After(actor_, timing_.heartbeat / 2, [this] { Tick(); });
}

void Cluster::Decide(const Event& event) {
  if (!state_) return;
  world_.CountStep();
  observer_->Before(event);
  coordinator::Actions result = Step(*state_, event, Now());
  observer_->After(event, result);
  // That a worker was heard waits for no disk, once its hello has been answered.
  std::erase_if(result.actions, [this](coordinator::Action& action) {
    auto* send = std::get_if<coordinator::SendToWorker>(&action);
    if (send == nullptr || !send->message.has_heartbeat_ack()) return false;
    if (!greeted_.contains(send->session)) return false;
    Do(*send);
    return true;
  });
  if (pending_.empty() && result.batches.empty()) return Release(std::move(result.actions));
  pending_.push_back({std::move(result.batches), std::move(result.actions)});
  ScheduleCommit();
}

void Cluster::ScheduleCommit() {
  if (commit_due_) return;
  commit_due_ = true;
  const bool slow = slow_until_ > world_.now();
  const absl::Duration sync = slow ? slow_until_ - world_.now() : world_.Millis(0, 12);
  world_.After(actor_, sync, [this] { CommitSome(); });
}

void Cluster::CommitSome() {
  commit_due_ = false;
  std::deque<Pending> group;
  group.swap(pending_);
  for (Pending& next : group) {
    const absl::StatusOr<int64_t> done = disk_.Commit(next.batches);
    if (!done.ok()) return world_.Violate(absl::StrCat("commit: ", done.status().message()));
    Release(std::move(next.actions));
  }
  if (!pending_.empty()) ScheduleCommit();
}

void Cluster::Release(std::vector<coordinator::Action> actions) {
  for (coordinator::Action& action : actions) {
    std::visit([this](auto& kind) { Do(kind); }, action);
  }
}

void Cluster::Do(coordinator::PublishJob& action) { observer_->OnDurable(*action.job); }

void Cluster::Do(coordinator::LogNote& action) {
  if (world_.verbose()) world_.Trace("coord", action.text);
}

v1::PlanResult Cluster::PlanOf(const v1::JobSpec& spec) const {
  v1::PlanResult result;
  if (spec.name() == "refused") {
    result.mutable_refusal()->set_message("does not fit");
    return result;
  }
  v1::RunPlan& plan = *result.mutable_plan();
  *plan.mutable_spec() = spec;
  plan.set_plan_hash(77);
  for (int r = 0; r < spec.parallel().ranks(); ++r) {
    v1::RankPlan& rank = *plan.add_ranks();
    rank.mutable_memory()->set_arena_bytes(100);
    v1::TagBytes& tag = *rank.mutable_host_memory()->add_tags();
    tag.set_tag("checkpoint");
    tag.set_peak_bytes(10'000'000);
  }
  return result;
}

void Cluster::Do(coordinator::StartPlanner& action) {
  world_.After(actor_, world_.Millis(1, 80), [this, start = action] {
    if (world_.Mishap(4)) {
      return Decide(
          coordinator::PlanFinished{start.job_id, absl::InternalError("the planner crashed")});
    }
    v1::PlanResult result = PlanOf(start.spec);
    if (start.earlier != nullptr) {
      *result.mutable_plan()->mutable_measured() = start.earlier->measured();
    }
    Decide(coordinator::PlanFinished{start.job_id, std::move(result)});
  });
}

// --- clients ---

bool Cluster::IsLost() {
  return lossy_until_ > world_.now() && world_.faults() && world_.Chance(4);
}

void Cluster::Call(std::function<Event(CallId)> event, Reply reply) {
  if (world_.Mishap(5)) return;  // the request is lost
  world_.After(actor_, Delay(), [this, event = std::move(event), reply = std::move(reply)] {
    if (!state_) return;
    const CallId call = next_call_++;
    if (reply) calls_[call] = reply;
    Decide(event(call));
  });
}

void Cluster::Do(coordinator::ReplyJob& action) {
  const auto call = calls_.find(action.call);
  if (call == calls_.end()) return;
  const Reply reply = std::move(call->second);
  calls_.erase(call);
  if (action.job.ok()) observer_->OnReplied(**action.job);
  if (world_.Mishap(5)) return;  // the answer is lost
  // One about a job that a restore has unmade since is as good as lost: its client submits again.
  world_.After(Delay(), [this, reply, job = action.job, restores = restores_] {
    if (restores == restores_) reply(job);
  });
}

// --- the network ---

Cluster::Link* Cluster::LinkOf(size_t worker, uint64_t session) {
  const auto found = links_.find(link_of_worker_[worker]);
  if (found == links_.end() || found->second.session != session || found->second.dead) {
    return nullptr;
  }
  return &found->second;
}

void Cluster::TellWorkerClosed(const Link& link, absl::Duration delay, const std::string& why) {
  WorkerMachine& worker = *workers_[link.worker];
  world_.After(worker.daemon(), delay,
               [&worker, session = link.session, why] { worker.SessionEnded(session, why); });
}

void Cluster::TellCoordinatorClosed(const Link& link, absl::Duration delay) {
  world_.After(actor_, delay, [this, id = link.id] {
    greeted_.erase(id);
    links_.erase(id);
    Decide(coordinator::SessionClosed{id});
  });
}

void Cluster::Dial(size_t w, uint64_t session) {
  Link link{next_link_++, w, session, false, {}, {}};
  if (!state_) return TellWorkerClosed(link, Delay(), "connection refused");
  link_of_worker_[w] = link.id;
  links_[link.id] = link;
}

void Cluster::Hangup(size_t w, uint64_t session) {
  Link* link = LinkOf(w, session);
  if (link == nullptr) return;
  link->dead = true;
  TellCoordinatorClosed(*link, ArrivalUp(*link) - world_.now());
}

// In order on one stream. What is held up is sent again at growing pauses, and so comes up to as
// long after the network is whole as it had waited: behind what a newer stream brings, and also
// when its process is gone, for the kernel goes on.
Time Cluster::ArrivalUp(const Link& link) {
  const Time now = world_.now();
  Time arrival = std::max(link.last_up, now + Delay());
  const Time whole = blocked_up_[link.worker];
  if (whole > now) arrival = std::max(arrival, whole + world_.Between({}, whole - now));
  return arrival;
}

void Cluster::Cut(size_t w) {
  const auto found = links_.find(link_of_worker_[w]);
  if (found == links_.end() || found->second.dead) return;
  Link& link = found->second;
  link.dead = true;
  const bool soon = world_.Chance(60);
  TellCoordinatorClosed(link, soon ? Delay() : world_.Millis(500, 9000));
  if (world_.Chance(60)) TellWorkerClosed(link, Delay(), "reset");  // else it notices the silence
}

void Cluster::Block(size_t w, bool up, bool down, absl::Duration how_long) {
  if (up) blocked_up_[w] = std::max(blocked_up_[w], world_.now() + how_long);
  if (down) blocked_down_[w] = std::max(blocked_down_[w], world_.now() + how_long);
  if (up && down) {
    Time& isolated = workers_[w]->machine().isolated_until;
    if (world_.Chance(50)) isolated = std::max(isolated, world_.now() + how_long);
  }
}

void Cluster::Up(size_t w, uint64_t session, v1::WorkerMessage message) {
  Link* link = LinkOf(w, session);
  if (link == nullptr) return;
  if (IsLost()) return Cut(w);
  link->last_up = ArrivalUp(*link);
  if (message.has_rank() && world_.Mishap(2)) Repeat(link->id, message);
  const auto shared = std::make_shared<v1::WorkerMessage>(std::move(message));
  const int copies = world_.Mishap(1) ? 2 : 1;
  for (int copy = 1; copy <= copies; ++copy) {
    world_.After(actor_, link->last_up - world_.now(), [this, id = link->id, shared, copy, copies] {
      if (copy == copies) return Arrive(id, *shared);
      v1::WorkerMessage repeated = *shared;
      Arrive(id, repeated);
    });
  }
}

// What a rank that lives said of itself before, once more; after the first time.
void Cluster::Repeat(SessionId id, const v1::WorkerMessage& message) {
  const absl::Duration first = links_.at(id).last_up - world_.now();
  world_.After(actor_, first + world_.Millis(5, 400), [this, id, message] {
    if (!state_) return;
    const v1::RankRef& ref = message.rank().ref();
    const auto job = state_->jobs.find(ref.fence().job_id());
    if (job == state_->jobs.end() || !job->second.attempt) return;
    const v1::AttemptRecord& attempt = job->second.attempt->record;
    if (attempt.nonce() != ref.fence().nonce()) return;
    if (attempt.ranks(ref.rank()).state() >= v1::RANK_STATE_EXITED) return;
    v1::WorkerMessage repeated = message;
    Arrive(id, repeated);
  });
}

void Cluster::Arrive(SessionId id, v1::WorkerMessage& message) {
  const auto link = links_.find(id);
  if (link == links_.end() || !state_) return;
  // What a dead stream delivered before it ended still counts; the rest is lost.
  if (link->second.dead && world_.Chance(50)) return;
  const uint64_t sequence = message.sequence();
  if (message.has_hello()) Decide(coordinator::HelloReceived{id, message.hello()});
  if (message.has_heartbeat()) {
    Decide(coordinator::HeartbeatReceived{id, sequence, std::move(*message.mutable_heartbeat())});
  }
  if (message.has_rank()) {
    Decide(coordinator::RankReported{id, sequence, std::move(*message.mutable_rank())});
  }
  if (message.has_progress()) {
    Decide(coordinator::ProgressReceived{id, std::move(*message.mutable_progress())});
  }
}

void Cluster::Do(coordinator::SendToWorker& action) {
  observer_->OnSent(action.message);
  const auto found = links_.find(action.session);
  if (found == links_.end() || found->second.dead) return;
  Link& link = found->second;
  if (IsLost()) return Cut(link.worker);
  if (action.message.has_hello_ack()) greeted_.insert(action.session);
  WorkerMachine& worker = *workers_[link.worker];
  link.last_down = std::max({link.last_down, world_.now() + Delay(), blocked_down_[link.worker]});
  const auto shared = std::make_shared<const v1::CoordinatorMessage>(std::move(action.message));
  const int copies = world_.Mishap(1) ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    world_.After(worker.daemon(), link.last_down - world_.now(),
                 [this, &worker, id = link.id, session = link.session, shared] {
                   const auto at = links_.find(id);
                   if (at == links_.end() || at->second.dead) return;
                   worker.Deliver(session, *shared);
                 });
  }
}

void Cluster::Do(coordinator::CloseSession& action) {
  const auto found = links_.find(action.session);
  if (found == links_.end() || found->second.dead) return;
  Link& link = found->second;
  link.dead = true;
  if (world_.verbose()) world_.Trace("coord", absl::StrCat("closes ", action.why.message()));
  const Time arrival =
      std::max({link.last_down, world_.now() + Delay(), blocked_down_[link.worker]});
  TellWorkerClosed(link, arrival - world_.now(), std::string(action.why.message()));
  TellCoordinatorClosed(link, absl::ZeroDuration());
}

// --- trainers ---

Gang& Cluster::GangOf(const v1::StartRank& start) {
  const v1::Fence& fence = start.ref().fence();
  std::unique_ptr<Gang>& gang = gangs_[fence.nonce()];
  if (gang != nullptr) return *gang;
  gang = std::make_unique<Gang>();
  gang->job_id = fence.job_id();
  gang->spec = start.plan().spec();
  gang->generation = fence.generation();
  gang->nonce = fence.nonce();
  gang->members.resize(gang->ranks());
  gang->newest_running = &newest_running_;
  gang->step_time = world_.Millis(60, 250);
  if (!gang->spec.checkpoint().path().empty()) gang->folder = &root_[gang->job_id];
  const int rank = static_cast<int>(world_.Random(gang->ranks()));
  if (world_.Mishap(2)) gang->deaf_rank = rank;
  if (world_.Mishap(2)) gang->wrong_hash_rank = rank;
  if (world_.Mishap(4)) gang->forgets_final = true;
  if (world_.Mishap(5)) gang->short_rank = rank;
  return *gang;
}

void Cluster::Launched(size_t w, const Trainer& trainer) {
  observer_->OnLaunched(*workers_[w], trainer);
}

void Cluster::Stepped(size_t w) { observer_->OnWorkerStepped(*workers_[w]); }

}  // namespace upipe::sim
