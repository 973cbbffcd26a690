// One step's working set: the state, what became dirty, and the actions so far. The handlers are
// spread by subject: jobs.cc (submit, plan, cancel, hold, records of ended jobs), stopping.cc
// (stop, close, restart), ranks.cc (reports), rendezvous.cc (meeting, resume, commits, success),
// nodes.cc (hello, silence), operators.cc (cordon, drain, fence, forget), deadlines.cc (start,
// stall, time limit), scheduler.cc (planning and placing); turn.cc writes down what changed.
// Private to coordinator/core.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/errors/rpc_error.h"
#include "coordinator/core/state.h"
#include "coordinator/core/waiting.h"

namespace upipe::coordinator {

class Turn {
 public:
  Turn(State& state, Moment now) : state_(state), now_(now) {}

  void Handle(const SubmitReceived& event);
  void Handle(const CancelReceived& event);
  void Handle(const HoldReceived& event);
  void Handle(const ReleaseReceived& event);
  void Handle(const CordonReceived& event);
  void Handle(const UncordonReceived& event);
  void Handle(const DrainReceived& event);
  void Handle(const FenceNodeReceived& event);
  void Handle(const ForgetNodeReceived& event);
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
  bool Holds(Guard guard, bool condition) const {
    return upipe::coordinator::Holds(state_, guard, condition);
  }
  void Fired(Row row) { ++state_.transitions.fired[static_cast<size_t>(row)]; }

  // turn.cc
  void SaveJob(Job& job);
  void SaveNode(Node& node);
  void SaveEpoch();
  void SaveDrops();
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
  // Deletes a record, after everything else of this step is written.
  void Drop(std::string key, std::optional<int64_t> revision) {
    drops_.push_back({std::move(key), std::nullopt, revision});
  }

  // jobs.cc
  Job* FindJob(const std::string& id);
  void AcceptPlan(Job& job, const v1::RunPlan& plan);
  void EndUnplaced(Job& job, v1::JobState end, v1::Cause cause);
  void FailUnplaced(Job& job, v1::CauseKind kind, std::string message);
  void SetHeld(CallId call, const std::string& id, bool held);
  // Drops records of jobs that ended long ago or many jobs ago, some at a time.
  void DropEnded();
  void DropJob(const std::string& id);

  // stopping.cc
  void CountTime(Job& job, double& seconds, BootTime until);
  void NoteRunning(Job& job);
  void CountLosses(Job& job);
  // Raises the intent, records the cause, orders the end: at a step boundary within `grace`, else
  // by force. Does nothing when the intent is not higher. Only for jobs that are placed.
  void Stop(Job& job, v1::StopIntent intent, v1::Cause cause, absl::Duration grace);
  // A failure that another attempt may not have.
  void Restart(Job& job, v1::CauseKind kind, std::string message, int rank = -1);
  absl::Duration UsefulGrace(const Job& job, absl::Duration grace);
  // From now on.
  void SetGrace(Attempt& attempt, absl::Duration grace);
  void KillNow(Job& job);
  void SendStops(const Job& job);
  // Closes the generation of a STOPPING job once it is dead and those who can be asked are gone.
  void EndIfGone(Job& job);
  void CloseGeneration(Job& job);
  bool MayRestart(Job& job, bool progress);
  void Requeue(Job& job);
  void PlanOnceMore(Job& job);
  void End(Job& job, v1::JobState end);

  // ranks.cc
  // The job's rank a fence and rank number name, or null when its latest attempt is another one.
  v1::RankRecord* MatchingRank(Job& job, const v1::Fence& fence, int rank);
  void ApplyReport(Node& node, const v1::RankReport& report);
  void ApplyCurrent(Job& job, const v1::RankReport& report);
  void NoteStep(Job& job, int rank, const v1::StepReport& report);
  void Disown(const Node& node, const v1::RankReport& report, const Job* job);
  void NoteExit(Job& job, const v1::RankReport& report);
  v1::StopIntent IntentAfter(Job& job, const v1::RankReport& report, v1::Cause& cause);
  void NoteLateFailure(Job& job, const v1::RankReport& report);
  static bool TookTheLastStep(const Job& job, int rank);
  void ExitedEarly(Job& job, int rank);
  void NoteGone(Job& job, const v1::Fence& fence, int rank);
  void SaveEarlier(Job& job, EarlierAttempt& earlier);
  void NoteProblems(Job& job, const v1::RankReport& report);
  // `placed`: where there may be ranks that the worker never heard of.
  void SendStop(const Node& node, const v1::Fence& fence, absl::Duration grace,
                absl::string_view reason, const std::vector<v1::RankSlot>& placed = {});

  // rendezvous.cc
  // Rendezvous complete, first barrier passed, all finished: whatever has become true.
  void Advance(Job& job);
  bool CheckPlanHashes(Job& job);
  bool DecideResume(Job& job);
  void NoteCommit(Job& job, const v1::CheckpointRef& commit);
  void SendRetain(const Job& job, const Node* only);
  void SendStart(const Job& job, int rank);
  void SendPeers(const Job& job, const Node& node);
  v1::Fence FenceOf(const Job& job) const;
  static v1::Fence FenceOf(const SlotHolder& holder);
  static v1::RankSlot RankSlotOf(int rank, int slot);

  // nodes.cc
  absl::Status CheckHello(const HelloReceived& event);
  void Adopt(Node& node, const HelloReceived& event, bool new_incarnation);
  void LearnGenerations(const v1::Hello& hello);
  void ReleaseUnlisted(Node& node, const v1::Hello& hello, bool new_incarnation);
  void RankLost(Node& node, Slot& slot, bool new_incarnation);
  Node* NodeOf(SessionId session);
  Node* FindNode(const std::string& worker);
  bool IsReachable(const std::string& worker);
  void CheckSilence(Node& node);
  void LoseNode(Node& node, const std::string& message);
  void TellJobs(const Node& node, absl::string_view kind, const std::string& message);
  void ResendAll();
  void ResendJob(const Job& job, const Node* only);

  // operators.cc
  Node* FindNode(CallId call, const std::string& worker);
  void ReplyWith(CallId call, const Node& node, std::vector<std::string> job_ids = {});
  void Cordon(Node& node, const std::string& reason);
  void Forget(const std::string& worker);
  // Moves jobs with unfinished ranks on a node elsewhere; returns their ids.
  std::vector<std::string> Vacate(const Node& node, absl::Duration grace, const std::string& why);

  // deadlines.cc
  void NotePositions(const Node& node, const v1::Heartbeat& heartbeat);
  using DeviceList = google::protobuf::RepeatedPtrField<v1::SlotDevice>;
  void NoteDevices(Node& node, const DeviceList& devices);
  void CheckStartDeadline(Job& job);
  void CheckStall(Job& job);
  void CheckTimeLimit(Job& job);
  v1::Cause StallCause(const Job& job, absl::Duration deadline);

  // scheduler.cc
  void StartPlanning(Job& job);
  bool RefuseOverCapacity(Job& job, int64_t slots, std::string reason);
  bool IsSettled();
  // False when the job is the head: it waits for busy slots, and everybody behind it with it.
  bool TryPlace(Job& job);
  const Fit& FitFor(const Need& need);
  void Place(Job& job);
  Attempt NewAttempt(Job& job);
  void PutAside(Job& job);

  State& state_;
  const Moment now_;
  Actions out_;
  std::map<Need, Fit> fits_;            // until a job is placed
  std::set<std::string> dirty_jobs_;    // records to write
  std::set<std::string> changed_jobs_;  // to publish only
  std::set<std::string> dirty_nodes_;
  bool dirty_epoch_ = false;
  std::vector<Write> drops_;
  std::vector<std::pair<CallId, std::string>> replies_;
};

std::string AttemptKey(const std::string& job_id, int64_t generation);
v1::Cause MakeCause(v1::CauseKind kind, std::string message);
// A worker's words, cut to what a record may hold.
v1::Cause Bounded(v1::Cause cause);
// What of a worker's report no rank can have said, or no record can hold; `field` is its path.
std::vector<FieldViolation> ReportViolations(const v1::RankReport& report, absl::string_view field);
std::vector<FieldViolation> StepViolations(const v1::StepReport& report, absl::string_view field);
// Why a session that sends anything before its hello is closed.
absl::Status HelloMissing();
}  // namespace upipe::coordinator
