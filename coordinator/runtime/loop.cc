#include "coordinator/runtime/loop.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/failpoint.h"
#include "common/ids.h"
#include "common/log.h"
#include "common/spec/job_spec.h"
#include "common/status.h"
#include "coordinator/core/step.h"
#include "coordinator/core/view.h"
#include "coordinator/runtime/log_place.h"

namespace upipe::coordinator {
namespace {

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

// Answers that may wait for the disk before clients get none.
constexpr size_t kMaxHeld = 4096;

bool IsOfClient(const Request& request) {
  return !std::holds_alternative<SessionMessage>(request) &&
         !std::holds_alternative<SessionEnded>(request) &&
         !std::holds_alternative<WatchEnded>(request) &&
         !std::holds_alternative<PlanEnded>(request) && !std::holds_alternative<Wake>(request);
}

absl::Status SlowDisk(size_t waiting) {
  return RpcError(Reason::kCoordinatorBusy,
                  absl::StrCat("the state disk is slow: ", waiting,
                               " answers wait for it; try again after a pause"));
}

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
      loop->state_, LoadState(store, {loop->options_.timing, RandomNonce, loop->options_.retention},
                              loop->Now(), &actions));
  UPIPE_RETURN_IF_ERROR(store.Commit(actions.batches).status());
  Loop* self = loop.get();
  loop->store_thread_ =
      std::make_unique<StoreThread>(store, ballast,
                                    StoreThread::Hooks{[self](absl::Duration took) {
                                                         if (self->metrics_ != nullptr)
                                                           self->metrics_->ObserveCommit(took);
                                                         self->Post(Wake{});
                                                       },
                                                       loop->options_.on_failed});
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
      if (request) Refuse(std::move(*request), Stopping());
      break;
    }
    if (request && held_.size() >= kMaxHeld && IsOfClient(*request)) {
      Refuse(std::move(*request), SlowDisk(held_.size()));
    } else if (request) {
      std::visit([this](auto& call) { Take(std::move(call)); }, *request);
    }
    if (Now().boot >= tick_due) {
      Tick();
      tick_due = Now().boot + period;
    }
    ReleaseCommitted();
  }
  while (std::optional<Request> request = requests_.Pop()) Refuse(std::move(*request), Stopping());
  store_thread_.reset();  // commits what is decided; what waits for it may then leave
  while (!held_.empty()) {
    held_.front().second();
    held_.pop_front();
  }
  planners_.reset();  // last: what was held may still start or kill a planner
  const absl::Status ending = Stopping();
  for (auto& [call, done] : calls_) done(ending);
  for (auto& [call, done] : node_calls_) done(ending);
  for (auto& [job, watcher] : watchers_) watcher->End(ending);
  for (auto& [session, link] : links_) link->Close(ending);
}

void Loop::Refuse(Request request, const absl::Status& why) {
  std::visit(Overloaded{[&](WatchCall& call) { call.watcher->End(why); },
                        [&](SessionMessage& call) { call.link->Close(why); }, [](WatchEnded&) {},
                        [](SessionEnded&) {}, [](PlanEnded&) {}, [](Wake&) {},
                        [&](auto& call) { call.done(why); }},
             request);
}

void Loop::Tick() {
  Decide(coordinator::Tick{});
  const Moment now = Now();
  if (options_.on_tick) options_.on_tick(now.boot);
  if (metrics_ == nullptr || now.boot < metrics_due_) return;
  metrics_->Update(state_, now);
  metrics_due_ = now.boot + absl::Seconds(1);
}

void Loop::Decide(const Event& event) {
  const Moment now = Now();
  Actions result = Step(state_, event, now);
  if (metrics_ != nullptr) metrics_->ObserveStep(event, Now().boot - now.boot);
  if (!result.batches.empty()) store_thread_->Commit(std::move(result.batches));
  // That a worker was heard is no decision: its acknowledgement waits for no disk.
  std::erase_if(result.actions, [this](Action& action) {
    auto* send = std::get_if<SendToWorker>(&action);
    if (send == nullptr || !send->message.has_heartbeat_ack()) return false;
    if (!greeted_.contains(send->session)) return false;  // behind its HelloAck
    Do(*send);
    return true;
  });
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

template <typename Response>
CallId Loop::AwaitJob(Done<Response> done) {
  const CallId number = next_call_++;
  calls_[number] = [done = std::move(done)](absl::StatusOr<v1::Job> job) {
    if (!job.ok()) return done(job.status());
    Response response;
    *response.mutable_job() = *std::move(job);
    done(std::move(response));
  };
  return number;
}

template <typename Response>
CallId Loop::AwaitNode(Done<Response> done) {
  const CallId number = next_call_++;
  node_calls_[number] = [done = std::move(done)](absl::StatusOr<v1::DrainResponse> answer) {
    if (!answer.ok()) return done(answer.status());
    if constexpr (std::is_same_v<Response, v1::DrainResponse>) {
      done(std::move(answer));
    } else {
      Response response;
      if constexpr (!std::is_same_v<Response, v1::ForgetNodeResponse>) {
        *response.mutable_node() = std::move(*answer->mutable_node());
      }
      done(std::move(response));
    }
  };
  return number;
}

void Loop::Take(SubmitCall call) {
  const std::string& id = call.request.request_id();
  if (!state_.job_of_request.contains(id)) {
    const std::vector<Violation> violations = ValidateJobSpec(call.request.spec());
    if (!violations.empty()) return call.done(BadSpec(violations));
    const absl::Status room = store_thread_->AcceptsSubmits();
    if (!room.ok()) return call.done(room);
  }
  Decide(SubmitReceived{AwaitJob<v1::SubmitResponse>(std::move(call.done)),
                        NewJobId(call.request.spec().name()), id, WithDefaults(call.request.spec()),
                        call.request.hold()});
}

void Loop::Take(CancelCall call) {
  const CallId number = AwaitJob<v1::CancelResponse>(std::move(call.done));
  std::optional<absl::Duration> grace;
  if (call.request.has_grace_millis()) grace = absl::Milliseconds(call.request.grace_millis());
  Decide(CancelReceived{number, call.request.id(), grace});
}

void Loop::Take(HoldCall call) {
  Decide(HoldReceived{AwaitJob<v1::HoldResponse>(std::move(call.done)), call.request.id()});
}

void Loop::Take(ReleaseCall call) {
  Decide(ReleaseReceived{AwaitJob<v1::ReleaseResponse>(std::move(call.done)), call.request.id()});
}

void Loop::Take(WhyCall call) {
  AfterCommit(
      [done = std::move(call.done), why = Why(state_, call.request.id(), Now())] { done(why); });
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
  nodes.set_coordinator_version(options_.version);
  nodes.set_coordinator_metrics_address(options_.metrics_address);
  for (const std::string& setting : options_.configuration) {
    nodes.add_coordinator_configuration(setting);
  }
  AfterCommit([done = std::move(call.done), nodes = std::move(nodes)] { done(nodes); });
}

void Loop::Take(CordonCall call) {
  Decide(CordonReceived{AwaitNode(std::move(call.done)), call.request.worker(),
                        call.request.reason()});
}

void Loop::Take(DrainCall call) {
  std::optional<absl::Duration> grace;
  if (call.request.has_grace_millis()) grace = absl::Milliseconds(call.request.grace_millis());
  Decide(DrainReceived{AwaitNode(std::move(call.done)), call.request.worker(),
                       call.request.reason(), grace});
}

void Loop::Take(UncordonCall call) {
  Decide(UncordonReceived{AwaitNode(std::move(call.done)), call.request.worker()});
}

void Loop::Take(FenceNodeCall call) {
  Decide(FenceNodeReceived{AwaitNode(std::move(call.done)), call.request.worker()});
}

void Loop::Take(ForgetNodeCall call) {
  Decide(ForgetNodeReceived{AwaitNode(std::move(call.done)), call.request.worker()});
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
  const absl::StatusOr<LogPlace> place = FindLog(state_, call.request);
  if (!place.ok()) return call.done(place.status());
  v1::CoordinatorMessage message;
  v1::OpenLog& open = *message.mutable_open_log();
  open.set_request_id(call.upload_id);
  *open.mutable_ref() = place->ref;
  open.set_offset(call.request.offset());
  open.set_follow(call.request.follow());
  open.set_file(call.request.file());
  AfterCommit(
      [this, done = std::move(call.done), place = *place, message = std::move(message)]() mutable {
        SendToWorker send{place.session, std::move(message)};
        Do(send);
        done(place.worker);
      });
}

void Loop::Take(BackupCall call) {
  store_thread_->Copy(std::move(call.path),
                      [done = std::move(call.done)](absl::StatusOr<int64_t> revision) {
                        done(absl::IsCancelled(revision.status()) ? Stopping() : revision);
                      });
}

void Loop::Take(SessionMessage call) {
  links_.try_emplace(call.session, call.link);
  v1::WorkerMessage& message = call.message;
  switch (message.kind_case()) {
    case v1::WorkerMessage::kHello:
      return Decide(HelloReceived{call.session, message.hello()});
    case v1::WorkerMessage::kHeartbeat:
      return Decide(HeartbeatReceived{call.session, message.sequence(),
                                      std::move(*message.mutable_heartbeat())});
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
  greeted_.erase(call.session);
  Decide(SessionClosed{call.session});
}

void Loop::Do(ReplyJob& action) {
  const auto call = calls_.find(action.call);
  if (call == calls_.end()) return;
  const Done<v1::Job> done = std::move(call->second);
  calls_.erase(call);
  Failpoint(failpoints::kCoordinatorReply).IgnoreError();
  if (action.job.ok()) {
    done(**action.job);
  } else {
    done(action.job.status());
  }
}

void Loop::Do(ReplyNode& action) {
  const auto call = node_calls_.find(action.call);
  if (call == node_calls_.end()) return;
  const Done<v1::DrainResponse> done = std::move(call->second);
  node_calls_.erase(call);
  if (!action.node.ok()) return done(action.node.status());
  v1::DrainResponse response;
  *response.mutable_node() = *std::move(action.node);
  for (std::string& id : action.job_ids) response.add_job_ids(std::move(id));
  done(std::move(response));
}

void Loop::Do(SendToWorker& action) {
  const auto link = links_.find(action.session);
  if (link == links_.end()) return;
  if (action.message.has_hello_ack()) greeted_.insert(action.session);
  Failpoint(failpoints::kCoordinatorSend).IgnoreError();
  link->second->Send(std::move(action.message));
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
