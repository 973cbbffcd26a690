// The deciding thread: takes requests from a bounded queue, steps the core, hands writes to the
// store thread, and lets replies and commands leave once they are durable.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "common/bounded_queue.h"
#include "common/clock.h"
#include "coordinator/core/state.h"
#include "coordinator/runtime/metrics.h"
#include "coordinator/runtime/planner_pool.h"
#include "coordinator/runtime/requests.h"
#include "coordinator/runtime/store_thread.h"

namespace upipe::coordinator {

class Loop {
 public:
  struct Options {
    Timing timing;
    Retention retention;
    PlannerPool::Options planner;
    bool insecure_listen = false;
    // What ListNodes says of this coordinator.
    std::string version;
    std::string metrics_address;
    std::vector<std::string> configuration;       // "heartbeat=2s"
    std::function<void(BootTime)> on_tick;        // on the deciding thread
    std::function<void(absl::Status)> on_failed;  // the store broke: end the process
    // A new step report of a job's rank 0; on the deciding thread, must not block.
    std::function<void(const std::string& job_id, const v1::StepReport&)> on_report;
  };
  // Loads the state. `store`, `ballast` and `metrics` (may be null) outlive the loop.
  static absl::StatusOr<std::unique_ptr<Loop>> Create(Options options, Store& store,
                                                      Ballast& ballast, Metrics* metrics);
  ~Loop();

  // Hands a request over. Thread-safe, never blocks. False when too many wait or the loop ended;
  // the request's answer is then the caller's to give.
  bool Post(Request request) { return requests_.TryPush(std::move(request)); }

  // Hands over the end of something the loop was told of. Thread-safe, never blocks, and is never
  // lost to a full queue: ends are bounded by their beginnings.
  void PostEnd(Request request) { requests_.PushOverCapacity(std::move(request)); }

  // Decides until Stop, then refuses what waits and closes every stream. Blocks: the caller is the
  // deciding thread.
  void Run();
  // Thread-safe.
  void Stop() { requests_.Close(); }

  int64_t epoch() const { return state_.epoch; }

 private:
  Loop(Options options, Metrics* metrics) : options_(std::move(options)), metrics_(metrics) {}
  Moment Now() const { return {SystemClock().Now(), SystemClock().UnixMillis()}; }
  void Decide(const Event& event);
  // Runs `release` once everything decided so far is durable.
  void AfterCommit(std::function<void()> release);
  void ReleaseCommitted();
  void Tick();
  // The number of a call that is answered with a job, or a node, wrapped in its response.
  template <typename Response>
  CallId AwaitJob(Done<Response> done);
  template <typename Response>
  CallId AwaitNode(Done<Response> done);
  static void Refuse(Request request, const absl::Status& why);

  void Take(SubmitCall call);
  void Take(CancelCall call);
  void Take(HoldCall call);
  void Take(ReleaseCall call);
  void Take(WhyCall call);
  void Take(GetJobCall call);
  void Take(ListJobsCall call);
  void Take(ListNodesCall call);
  void Take(CordonCall call);
  void Take(DrainCall call);
  void Take(UncordonCall call);
  void Take(FenceNodeCall call);
  void Take(ForgetNodeCall call);
  void Take(WatchCall call);
  void Take(WatchEnded call);
  void Take(LogCall call);
  void Take(BackupCall call);
  void Take(SessionMessage call);
  void Take(SessionEnded call);
  void Take(PlanEnded call) { Decide(std::move(call.event)); }
  void Take(Wake) {}

  void Do(ReplyJob& action);
  void Do(ReplyNode& action);
  void Do(SendToWorker& action);
  void Do(CloseSession& action);
  void Do(StartPlanner& action) { planners_->Start(std::move(action)); }
  void Do(KillPlanner& action) { planners_->Kill(action.job_id); }
  void Do(PublishJob& action);
  void Do(PublishReport& action);
  void Do(LogNote& action);

  Options options_;
  Metrics* metrics_;
  BoundedQueue<Request> requests_{4096};
  State state_;
  std::unique_ptr<StoreThread> store_thread_;
  std::unique_ptr<PlannerPool> planners_;
  std::deque<std::pair<uint64_t, std::function<void()>>> held_;  // step number, what waits for it
  std::map<CallId, Done<v1::Job>> calls_;
  std::map<CallId, Done<v1::DrainResponse>> node_calls_;
  CallId next_call_ = 1;
  std::map<SessionId, std::shared_ptr<WorkerLink>> links_;
  std::set<SessionId> greeted_;                                    // whose HelloAck has left
  std::multimap<std::string, std::shared_ptr<Watcher>> watchers_;  // by job id
  BootTime metrics_due_;
};

// What calls and streams end with when the coordinator stops.
absl::Status Stopping();

}  // namespace upipe::coordinator
