#include "planner/selfcheck_threads.h"

#include <thread>
#include <utility>
#include <vector>

#include "common/status.h"
#include "engine/comm/comm_factory.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/train/rank_run.h"

namespace upipe::planner {

absl::StatusOr<train::SelfCheckReport> CheckOnThreads(const v1::RunPlan& plan,
                                                      const train::SelfCheckOptions& options) {
  const int ranks = plan.spec().parallel().ranks();
  UPIPE_ASSIGN_OR_RETURN(const auto shared, comm::OpenCommDevice(plan.spec().parallel().backend()));
  const auto comms = comm::InprocGroup::Create(
      ranks,
      {.deadline = train::CollectiveDeadline(plan),
       .observer = {},
       .reduce_room = comm::ReduceRoomOf(plan.spec().parallel().backend())},
      shared);
  std::vector<absl::StatusOr<train::SelfCheckReport>> reports(ranks, absl::UnknownError(""));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      reports[rank] = train::RunSelfCheck(
          {.plan = plan, .rank = rank, .comm = *comms[rank], .options = options});
      if (!reports[rank].ok()) comms[rank]->Abort(reports[rank].status());
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& report : reports) {
    if (!report.ok() && report.status() == comms[0]->status()) return report.status();
  }
  for (const auto& report : reports) UPIPE_RETURN_IF_ERROR(report.status());
  return std::move(reports[0]);
}

}  // namespace upipe::planner
