#include "planner/dry_run.h"

#include "common/status.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/train/measured_workspaces.h"
#include "engine/train/memory_message.h"
#include "engine/train/step.h"
#include "kernels/backends.h"

namespace upipe::planner {

namespace {

// Has a dry device and communicator count by section, and passes moments on.
class SectionCounter final : public engine::MomentObserver {
 public:
  SectionCounter(kernels::DryDevice& device, comm::DryCommunicator& comm,
                 engine::MomentObserver* next)
      : device_(device), comm_(comm), next_(next) {}

  void Begin(const engine::Moment& moment) override {
    Enter(moment);
    if (next_ != nullptr) next_->Begin(moment);
  }
  // Forgets what was counted.
  void Restart() {
    counts_.sections.clear();
    Enter({.pass = StepPass::kIdle});
  }
  const StepCounts& counts() const { return counts_; }

 private:
  void Enter(const engine::Moment& moment) {
    SectionCounts& section = counts_.sections[{moment.pass, moment.stage >= 0}];
    device_.CountInto(&section.ops);
    comm_.CountInto(&section.traffic);
  }

  kernels::DryDevice& device_;
  comm::DryCommunicator& comm_;
  engine::MomentObserver* const next_;
  StepCounts counts_;
};

}  // namespace

absl::StatusOr<RankDryRun> DryRunRank(const v1::RunPlan& plan, int rank,
                                      const std::string& attention_kernel,
                                      DryRunObserver* observer) {
  const v1::JobSpec& spec = plan.spec();
  UPIPE_ASSIGN_OR_RETURN(auto device,
                         kernels::CreateDryDevice(spec.parallel().backend(), attention_kernel,
                                                  train::ScratchTableOf(plan)));
  const engine::RankStreams streams = engine::RankStreams::Create(*device, rank);
  comm::DryCommunicator comm(rank, spec.parallel().ranks(),
                             {.compute = streams.compute.get(),
                              .ranks_per_node = spec.parallel().ranks_per_node(),
                              .reduce_room = comm::ReduceRoomOf(spec.parallel().backend())});
  SectionCounter counter(*device, comm, observer);
  if (observer != nullptr) observer->Start({*device, comm, counter.counts()});
  const engine::RankContext context({.device = *device,
                                     .streams = streams,
                                     .comm = comm,
                                     .observer = &counter,
                                     .storage = model::StorageTypeOf(spec.train()),
                                     .mesh = parallel::Mesh::From(spec.parallel())});
  UPIPE_ASSIGN_OR_RETURN(auto step, train::TrainStep::Create(context, plan));
  counter.Restart();
  std::vector<int64_t> sent = comm.stats().bytes_sent_to_peer;
  for (int64_t& bytes : sent) bytes = -bytes;
  UPIPE_RETURN_IF_ERROR(step->Vote({}).status());
  const std::vector<train::HostTokens> micro_steps(spec.train().gradient_accumulation());
  UPIPE_RETURN_IF_ERROR(step->Run(1, micro_steps).status());
  const comm::CommStats after = comm.stats();
  for (size_t peer = 0; peer < sent.size(); ++peer) sent[peer] += after.bytes_sent_to_peer[peer];
  RankDryRun result;
  result.counts = counter.counts();
  if (spec.train().eval_sequences() > 0) UPIPE_RETURN_IF_ERROR(step->Evaluate(1, {}).status());
  if (observer != nullptr) observer->Finish();
  result.rank = ToRankPlan(rank, *device, sent, result.counts);
  return result;
}

v1::RankPlan ToRankPlan(int rank, kernels::DryDevice& device, const std::vector<int64_t>& sent,
                        const StepCounts& counts) {
  v1::RankPlan plan;
  plan.set_rank(rank);
  *plan.mutable_memory() = train::ToMessage(device.allocator().stats());
  *plan.mutable_host_memory() = train::ToMessage(device.host_allocator().stats());
  plan.mutable_bytes_sent_to_peer()->Add(sent.begin(), sent.end());
  const kernels::DryCounts all = counts.ops();
  plan.set_step_flops(all.total().cost.flops);
  plan.set_bytes_to_host(all.bytes_to_host);
  plan.set_bytes_from_host(all.bytes_from_host);
  return plan;
}

}  // namespace upipe::planner
