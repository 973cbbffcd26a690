// What must hold whatever happens. Looks at the coordinator's state beside the truth of the
// simulation, at what changed after every step and at everything now and then.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "coordinator/core/state.h"
#include "tests/sim/system/checkpoint_root.h"
#include "upipe/v1/job_service.pb.h"

namespace upipe::sim {

class Cluster;
class Trainer;
class WorkerMachine;
class World;

class Observer {
 public:
  explicit Observer(Cluster& cluster);

  void OnLoaded();
  // The store went back to a backup: so does what counts as committed.
  void OnRestored();
  void Before(const coordinator::Event& event);
  void After(const coordinator::Event& event, const coordinator::Actions& result);
  // What left after its commit.
  void OnDurable(const v1::Job& job);
  void OnReplied(const v1::Job& job);
  void OnSent(const v1::CoordinatorMessage& message);
  void OnSubmitted(const std::string& request_id, const std::string& job_id);

  void OnLaunched(const WorkerMachine& worker, const Trainer& trainer);
  void OnWorkerStepped(const WorkerMachine& worker);
  void CheckAll();

  void AddFired(const coordinator::State& state,
                std::array<int64_t, coordinator::kNumRows>& fired) const;

 private:
  // A node as its messages alone describe it.
  struct NodeView {
    bool greeted = false;
    bool lost = false;
    bool cordoned = false;
    bool leaving = false;
    coordinator::SessionId session = 0;
    BootTime heard;
  };
  // A job as it was after the step before.
  struct JobView {
    v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
    v1::StopIntent intent = v1::STOP_INTENT_UNSPECIFIED;
    int64_t generation = 0;
    int64_t retry_at_unix_millis = 0;
    std::vector<v1::RankState> ranks;
    bool resume_decided = false;
    std::optional<StepKey> resume;
    std::optional<StepKey> last_commit;
  };
  // A job as clients were told of it.
  struct Ledger {
    v1::JobState end = v1::JOB_STATE_UNSPECIFIED;
    int64_t generation = 0;
    std::optional<StepKey> last_commit;
  };

  void NoteNode(const coordinator::Event& event);
  void NoteHello(const coordinator::HelloReceived& event);
  NodeView* OfSession(coordinator::SessionId session);
  bool IsReady(const std::string& worker) const;
  bool IsSettled() const;

  static JobView ViewOf(const coordinator::Job& job);
  void CheckJob(const coordinator::Job& job);
  void CheckTransition(const coordinator::Job& job, const JobView& before);
  void CheckRanks(const coordinator::Job& job, const JobView& before);
  void CheckCheckpoints(const coordinator::Job& job, const JobView& before);
  void CheckBudgets(const coordinator::Job& job);
  void CheckPlannedAgain(const coordinator::Job& job);
  void CheckPlaced(const coordinator::Job& job, const JobView& before);
  void CheckOrder(const coordinator::Job& placed);
  void CheckClosed(const coordinator::Job& job);
  void CheckSucceeded(const coordinator::Job& job);
  void CheckFailed(const coordinator::Job& job);
  void CheckSlots(const WorkerMachine& worker);
  void CheckBounds();
  void Violate(const coordinator::Job& job, const std::string& what);

  Cluster& cluster_;
  World& world_;
  std::map<std::string, NodeView> nodes_;
  std::map<std::string, JobView> seen_;
  std::map<std::string, Ledger> ledger_;
  std::map<std::string, std::string> job_of_request_;
  int64_t commits_before_ = 0;
  bool restored_ = false;  // and not every known worker has said hello since
  bool ever_restored_ = false;
};

}  // namespace upipe::sim
