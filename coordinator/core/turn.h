// One step's working set: the state, what became dirty, and the actions so far. The handlers are
// spread by subject: jobs.cc (submit, plan, cancel, stop, end), ranks.cc (reports, rendezvous),
// nodes.cc (hello, silence), scheduler.cc (planning and placing); turn.cc writes down what changed.
// Private to coordinator/core.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/state.h"

namespace upipe::coordinator {

class Turn {
 public:
  Turn(State& state, Moment now) : state_(state), now_(now) {}

  void Handle(const SubmitReceived& event);
  void Handle(const CancelReceived& event);
  void Handle(const PlanFinished& event);
  void Handle(const HelloReceived& event);
  void Handle(const HeartbeatReceived& event);
  void Handle(const RankReported& event);
  void Handle(const ProgressReceived& event);
  void Handle(const SessionClosed& event);
  void Handle(const Tick& event);

  // Plans and places what can be.
  void Schedule();

  // Turns everything dirty into batches, publications and replies.
  Actions Finish();

 private:
  // turn.cc
  void SaveJob(Job& job);
  void SaveNode(Node& node);
  void AddEvent(Job& job, absl::string_view kind, absl::string_view message);
  void Reply(CallId call, const Job& job) { replies_.emplace_back(call, job.record.id()); }
  void Reply(CallId call, absl::Status error) {
    out_.actions.push_back(ReplyJob{call, std::move(error)});
  }
  void Send(const Node& node, v1::CoordinatorMessage message);
  void Close(SessionId session, absl::Status why);
  void Note(std::string text) { out_.actions.push_back(LogNote{std::move(text)}); }
  void Dirty(const Job& job) { dirty_jobs_.insert(job.record.id()); }
  void SetReason(Job& job, std::string reason);

  // jobs.cc
  void AcceptPlan(Job& job, const v1::RunPlan& plan);
  void EndUnplaced(Job& job, v1::JobState end, v1::Cause cause);
  void FailUnplaced(Job& job, v1::CauseKind kind, std::string message);
  // Raises the intent, records the cause, orders the kill. Does nothing when the intent is not
  // higher.
  void Stop(Job& job, v1::StopIntent intent, v1::Cause cause);
  void Fail(Job& job, v1::CauseKind kind, std::string message, int rank = -1);
  void SendStops(const Job& job);
  // Ends a STOPPING job once enough of its ranks are proven or presumed gone.
  void EndIfGone(Job& job);

  // ranks.cc
  void ApplyReport(Node& node, const v1::RankReport& report);
  void ApplyCurrent(Job& job, const v1::RankReport& report);
  void Disown(const Node& node, const v1::RankReport& report, const Job* job);
  void NoteExit(Job& job, const v1::RankReport& report);
  // Rendezvous complete, first barrier passed, all finished: whatever has become true.
  void Advance(Job& job);
  bool CheckPlanHashes(Job& job);
  void SendStart(const Job& job, int rank);
  void SendPeers(const Job& job, const Node& node);
  v1::Fence FenceOf(const Job& job) const;
  void SendStop(const Node& node, const v1::Fence& fence, absl::Duration grace,
                absl::string_view reason);

  // nodes.cc
  absl::Status CheckHello(const HelloReceived& event);
  void Adopt(Node& node, const HelloReceived& event, bool new_incarnation);
  void ReleaseUnlisted(Node& node, const v1::Hello& hello, bool new_incarnation);
  void RankLost(Node& node, Slot& slot, bool new_incarnation);
  Node* NodeOf(SessionId session);
  Node* FindNode(const std::string& worker);
  bool IsReachable(const std::string& worker);
  void CheckSilence(Node& node);
  void LoseNode(Node& node);
  void TellJobs(const Node& node, absl::string_view kind, const std::string& message);
  void CheckStartDeadline(Job& job);
  void ResendAll();
  void ResendJob(const Job& job, const Node* only);

  // scheduler.cc
  void StartPlanning(Job& job);
  bool RefuseOverCapacity(Job& job, int64_t slots, std::string reason);
  bool TryPlace(Job& job, absl::string_view ahead);
  void Place(Job& job, const std::vector<std::pair<Node*, int>>& places);
  Job* FindJob(const std::string& id);

  State& state_;
  const Moment now_;
  Actions out_;
  std::set<std::string> dirty_jobs_;    // records to write
  std::set<std::string> changed_jobs_;  // to publish only
  std::set<std::string> dirty_nodes_;
  std::vector<std::pair<CallId, std::string>> replies_;
};

// The job's rank a fence and rank number name, or null when the job's latest attempt is another
// one.
v1::RankRecord* MatchingRank(Job& job, const v1::Fence& fence, int rank);
// Why a session that sends anything before its hello is closed.
absl::Status HelloMissing();
// Bytes the busiest rank of a plan takes from its machine.
int64_t PlannedBytesPerRank(const v1::RunPlan& plan);

}  // namespace upipe::coordinator
