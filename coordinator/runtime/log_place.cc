#include "coordinator/runtime/log_place.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/errors/rpc_error.h"
#include "common/status.h"
#include "coordinator/core/view.h"

namespace upipe::coordinator {
namespace {

// The workers of an attempt, by rank; `nonce` is only known of the latest.
struct Placement {
  std::vector<std::string> workers;
  std::string nonce;
};

absl::StatusOr<Placement> PlacementOf(const Job& job, int64_t generation) {
  Placement placement;
  if (job.attempt->record.generation() == generation) {
    placement.nonce = job.attempt->record.nonce();
    for (const v1::RankRecord& rank : job.attempt->record.ranks()) {
      placement.workers.push_back(rank.worker());
    }
    return placement;
  }
  for (const v1::AttemptSummary& attempt : job.record.attempts()) {
    // With very many ranks a summary names no workers.
    if (attempt.generation() != generation || attempt.workers().empty()) continue;
    placement.workers.assign(attempt.workers().begin(), attempt.workers().end());
    return placement;
  }
  return RpcError(Reason::kLogNotFound,
                  absl::StrCat("where generation ", generation, " of job ", job.record.id(),
                               " ran is not kept any more; `upipe describe` lists the attempts "
                               "that are known"),
                  {{"job", job.record.id()}, {"generation", generation}});
}

absl::Status Wrong(const std::string& field, const std::string& what, const Job& job) {
  return InvalidFields(Reason::kRequestInvalid, {{field, what}}, {{"job", job.record.id()}});
}

}  // namespace

absl::StatusOr<LogPlace> FindLog(const State& state, const v1::LogsRequest& request) {
  const auto found = state.jobs.find(request.id());
  if (found == state.jobs.end()) return JobNotFound(request.id());
  const Job& job = found->second;
  if (!job.attempt) {
    const std::string shown = ViewJob(job, JobDetail::kSummary).shown_state();
    return RpcError(
        Reason::kJobNotStarted,
        absl::StrCat("job ", request.id(), " is ", shown, " and was not started: there is no log"),
        {{"job", request.id()}, {"state", shown}});
  }
  const int64_t latest = job.attempt->record.generation();
  const int64_t generation = request.generation() == 0 ? latest : request.generation();
  if (generation > latest) {
    return Wrong(
        "generation",
        absl::StrCat("is ", generation, ", the latest of job ", request.id(), " is ", latest), job);
  }
  UPIPE_ASSIGN_OR_RETURN(const Placement placement, PlacementOf(job, generation));
  const int rank = request.rank();
  if (rank < 0 || rank >= static_cast<int>(placement.workers.size())) {
    return Wrong("rank",
                 absl::StrCat("is ", rank, ", job ", request.id(), " has ranks 0 to ",
                              static_cast<int>(placement.workers.size()) - 1),
                 job);
  }
  const std::string& worker = placement.workers[rank];
  const auto node = state.nodes.find(worker);
  if (node == state.nodes.end() || node->second.session == 0) {
    const bool lost = node == state.nodes.end() || node->second.lost;
    return RpcError(
        lost ? Reason::kWorkerLost : Reason::kWorkerDisconnected,
        absl::StrCat("worker ", worker, " keeps this log and is ",
                     lost ? "lost; start it again on its node" : "not connected; try again"),
        {{"worker", worker}, {"job", request.id()}, {"rank", rank}});
  }
  LogPlace place{worker, node->second.session, {}};
  v1::Fence& fence = *place.ref.mutable_fence();
  fence.set_job_id(request.id());
  fence.set_generation(generation);
  fence.set_nonce(placement.nonce);
  fence.set_epoch(state.epoch);
  place.ref.set_rank(rank);
  return place;
}

}  // namespace upipe::coordinator
