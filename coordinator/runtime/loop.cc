#include "coordinator/runtime/loop.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "coordinator/core/step.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

// INVALID_ARGUMENT with every violation.
absl::Status BadSpec(const std::vector<Violation>& violations) {
  std::vector<FieldViolation> fields;
  for (const Violation& violation : violations) {
    fields.push_back({absl::StrCat("spec.", violation.field), violation.message});
  }
  return InvalidFields(Reason::kSpecInvalid, fields, {{"violations", violations.size()}});
}

}  // namespace

absl::Status Stopping() {
  return RpcError(Reason::kCoordinatorStopping,
                  "the coordinator is shutting down; try again when it is back");
}

absl::StatusOr<std::unique_ptr<Loop>> Loop::Create(Options options, Store& store, Ballast& ballast,
                                                   Metrics* metrics) {
  std::unique_ptr<Loop> loop(new Loop(std::move(options), metrics));
  Actions actions;
  UPIPE_ASSIGN_OR_RETURN(
      loop->state_, LoadState(store, {loop->options_.timing, RandomNonce}, loop->Now(), &actions));
  UPIPE_RETURN_IF_ERROR(store.Commit(actions.batches).status());
  Loop* self = loop.get();
  loop->store_thread_ = std::make_unique<StoreThread>(
      store, ballast, StoreThread::Hooks{[self] { self->Post(Wake{}); }, loop->options_.on_failed});
  loop->planners_ =
      std::make_unique<PlannerPool>(loop->options_.planner, [self](PlanFinished event) {
        // Blocks this pool thread while the loop is busy: a result must not be lost.
        self->requests_.Push(PlanEnded{std::move(event)});
      });
  return loop;
}

Loop::~Loop() { requests_.Close(); }

void Loop::Run() {
  const absl::Duration period =
      std::clamp(options_.timing.heartbeat / 4, absl::Milliseconds(5), absl::Milliseconds(500));
  BootTime tick_due = Now().boot;
  while (true) {
    const absl::Duration wait = std::max(absl::ZeroDuration(), tick_due - Now().boot);
    std::optional<Request> request = requests_.PopFor(wait);
    if (requests_.closed()) {
      if (request) Refuse(std::move(*request));
      break;
    }
    if (request) std::visit([this](auto& call) { Take(std::move(call)); }, *request);
    if (Now().boot >= tick_due) {
      Tick();
      tick_due = Now().boot + period;
    }
    ReleaseCommitted();
  }
  while (std::optional<Request> request = requests_.Pop()) Refuse(std::move(*request));
  store_thread_.reset();  // commits what is decided; what waits for it may then leave
  while (!held_.empty()) {
    held_.front().second();
    held_.pop_front();
  }
  planners_.reset();  // last: what was held may still start or kill a planner
  const absl::Status ending = Stopping();
  for (auto& [call, done] : calls_) done(ending);
  for (auto& [job, watcher] : watchers_) watcher->End(ending);
  for (auto& [session, link] : links_) link->Close(ending);
}

void Loop::Refuse(Request request) {
  const absl::Status ending = Stopping();
  std::visit(Overloaded{[&](WatchCall& call) { call.watcher->End(ending); },
                        [&](SessionMessage& call) { call.link->Close(ending); }, [](WatchEnded&) {},
                        [](SessionEnded&) {}, [](PlanEnded&) {}, [](Wake&) {},
                        [&](auto& call) { call.done(ending); }},
             request);
}

void Loop::Tick() {
  Decide(coordinator::Tick{});
  const BootTime now = Now().boot;
  if (options_.on_tick) options_.on_tick(now);
  if (metrics_ == nullptr || now < metrics_due_) return;
  metrics_->Update(state_, now);
  metrics_due_ = now + absl::Seconds(1);
}

void Loop::Decide(const Event& event) {
  Actions result = Step(state_, event, Now());
  if (!result.batches.empty()) store_thread_->Commit(std::move(result.batches));
  if (result.actions.empty()) return;
  AfterCommit([this, actions = std::move(result.actions)]() mutable {
    for (Action& action : actions) std::visit([this](auto& a) { Do(a); }, action);
  });
}

void Loop::AfterCommit(std::function<void()> release) {
  held_.emplace_back(store_thread_->handed_over(), std::move(release));
  ReleaseCommitted();
}

void Loop::ReleaseCommitted() {
  const uint64_t committed = store_thread_->committed();
  while (!held_.empty() && held_.front().first <= committed) {
    const std::function<void()> release = std::move(held_.front().second);
    held_.pop_front();
    release();
  }
}

void Loop::Take(SubmitCall call) {
  const std::string& id = call.request.request_id();
  const auto done = [reply = call.done](absl::StatusOr<v1::Job> job) {
    if (!job.ok()) return reply(job.status());
    v1::SubmitResponse response;
    *response.mutable_job() = *std::move(job);
    reply(std::move(response));
  };
  if (!state_.job_of_request.contains(id)) {
    const std::vector<Violation> violations = ValidateJobSpec(call.request.spec());
    if (!violations.empty()) return call.done(BadSpec(violations));
    const absl::Status room = store_thread_->AcceptsSubmits();
    if (!room.ok()) return call.done(room);
  }
  const CallId number = next_call_++;
  calls_[number] = done;
  Decide(SubmitReceived{number, NewJobId(call.request.spec().name()), id,
                        WithDefaults(call.request.spec())});
}

void Loop::Take(CancelCall call) {
  const CallId number = next_call_++;
  calls_[number] = [reply = call.done](absl::StatusOr<v1::Job> job) {
    if (!job.ok()) return reply(job.status());
    v1::CancelResponse response;
    *response.mutable_job() = *std::move(job);
    reply(std::move(response));
  };
  Decide(CancelReceived{number, call.request.id()});
}

void Loop::Take(GetJobCall call) {
  AfterCommit(
      [done = std::move(call.done), job = GetJob(state_, call.request.id())] { done(job); });
}

void Loop::Take(ListJobsCall call) {
  AfterCommit([done = std::move(call.done), jobs = ListJobs(state_, call.request)] { done(jobs); });
}

void Loop::Take(ListNodesCall call) {
  v1::ListNodesResponse nodes = ListNodes(state_, Now().boot);
  nodes.set_coordinator_insecure_listen(options_.insecure_listen);
  AfterCommit([done = std::move(call.done), nodes = std::move(nodes)] { done(nodes); });
}

void Loop::Take(WatchCall call) {
  absl::StatusOr<v1::Job> job = GetJob(state_, call.job_id);
  if (!job.ok()) return call.watcher->End(job.status());
  AfterCommit([this, call = std::move(call), job = *std::move(job)] {
    watchers_.emplace(call.job_id, call.watcher);
    PublishJob first{std::make_shared<const v1::Job>(job)};
    call.watcher->OfferJob(first.job);
    if (!IsTerminal(job.state())) return;
    call.watcher->End(absl::OkStatus());
    Take(WatchEnded{call.watcher});
  });
}

void Loop::Take(WatchEnded call) {
  // Behind the WatchCall that may still wait for its commit.
  AfterCommit([this, watcher = std::move(call.watcher)] {
    std::erase_if(watchers_, [&](const auto& entry) { return entry.second == watcher; });
  });
}

void Loop::Take(LogCall call) {
  const auto job = state_.jobs.find(call.request.id());
  if (job == state_.jobs.end()) {
    return call.done(JobNotFound(call.request.id()));
  }
  if (!job->second.attempt) {
    const std::string state = ViewJob(job->second, JobDetail::kSummary).shown_state();
    return call.done(RpcError(Reason::kJobNotStarted,
                              absl::StrCat("job ", call.request.id(), " is ", state,
                                           " and was not started: there is no log"),
                              {{"job", call.request.id()}, {"state", state}}));
  }
  const v1::AttemptRecord& attempt = job->second.attempt->record;
  const int rank = call.request.rank();
  if (rank < 0 || rank >= attempt.ranks_size()) {
    return call.done(
        InvalidFields(Reason::kRequestInvalid,
                      {{"rank", absl::StrCat("is ", rank, ", job ", call.request.id(),
                                             " has ranks 0 to ", attempt.ranks_size() - 1)}},
                      {{"job", call.request.id()}, {"ranks", attempt.ranks_size()}}));
  }
  const std::string worker = attempt.ranks(rank).worker();
  const auto node = state_.nodes.find(worker);
  if (node == state_.nodes.end() || node->second.session == 0) {
    const bool lost = node != state_.nodes.end() && node->second.lost;
    return call.done(RpcError(
        lost ? Reason::kWorkerLost : Reason::kWorkerDisconnected,
        absl::StrCat("worker ", worker, " keeps this log and is ",
                     lost ? "lost; start it again on its node" : "not connected; try again"),
        {{"worker", worker}, {"job", call.request.id()}, {"rank", rank}}));
  }
  v1::CoordinatorMessage message;
  v1::OpenLog& open = *message.mutable_open_log();
  open.set_request_id(call.upload_id);
  v1::Fence& fence = *open.mutable_ref()->mutable_fence();
  fence.set_job_id(call.request.id());
  fence.set_generation(attempt.generation());
  fence.set_nonce(attempt.nonce());
  fence.set_epoch(state_.epoch);
  open.mutable_ref()->set_rank(rank);
  open.set_offset(call.request.offset());
  open.set_follow(call.request.follow());
  AfterCommit([this, done = std::move(call.done), worker, session = node->second.session,
               message = std::move(message)]() mutable {
    SendToWorker send{session, std::move(message)};
    Do(send);
    done(worker);
  });
}

void Loop::Take(SessionMessage call) {
  links_.try_emplace(call.session, call.link);
  v1::WorkerMessage& message = call.message;
  switch (message.kind_case()) {
    case v1::WorkerMessage::kHello:
      return Decide(HelloReceived{call.session, message.hello()});
    case v1::WorkerMessage::kHeartbeat:
      return Decide(HeartbeatReceived{call.session, message.sequence()});
    case v1::WorkerMessage::kRank:
      return Decide(RankReported{call.session, message.sequence(), message.rank()});
    case v1::WorkerMessage::kProgress:
      return Decide(ProgressReceived{call.session, message.progress()});
    case v1::WorkerMessage::KIND_NOT_SET:
      return call.link->Close(InvalidFields(Reason::kRequestInvalid,
                                            {{"kind", "is not set: the message has no content"}}));
  }
}

void Loop::Take(SessionEnded call) {
  links_.erase(call.session);
  Decide(SessionClosed{call.session});
}

void Loop::Do(ReplyJob& action) {
  const auto call = calls_.find(action.call);
  if (call == calls_.end()) return;
  const Done<v1::Job> done = std::move(call->second);
  calls_.erase(call);
  if (action.job.ok()) {
    done(**action.job);
  } else {
    done(action.job.status());
  }
}

void Loop::Do(SendToWorker& action) {
  const auto link = links_.find(action.session);
  if (link != links_.end()) link->second->Send(std::move(action.message));
}

void Loop::Do(CloseSession& action) {
  const auto link = links_.find(action.session);
  if (link == links_.end()) return;
  UPIPE_LOG(WARNING) << "session closed: " << action.why.message();
  link->second->Close(action.why);
}

void Loop::Do(PublishJob& action) {
  const auto [first, last] = watchers_.equal_range(action.job->id());
  for (auto it = first; it != last; ++it) {
    it->second->OfferJob(action.job);
    if (IsTerminal(action.job->state())) it->second->End(absl::OkStatus());
  }
  if (IsTerminal(action.job->state())) watchers_.erase(first, last);
}

void Loop::Do(PublishReport& action) {
  if (options_.on_report) options_.on_report(action.job_id, action.report);
  const auto [first, last] = watchers_.equal_range(action.job_id);
  for (auto it = first; it != last; ++it) it->second->OfferReport(action.report);
}

void Loop::Do(LogNote& action) { UPIPE_LOG(INFO) << action.text; }

}  // namespace upipe::coordinator
