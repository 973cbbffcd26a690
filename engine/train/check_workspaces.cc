#include "engine/train/check_workspaces.h"

#include <memory>
#include <vector>

#include "common/check.h"
#include "common/status.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/train/step.h"
#include "kernels/dry/dry_device.h"

namespace upipe::train {
namespace {

// Stands in for a device's ops in a dry run, and has it prepare each as its scratch is asked for.
class PreparingOps final : public kernels::OpTable {
 public:
  PreparingOps(kernels::OpTable& ops, absl::Status& first_error)
      : ops_(ops), first_error_(first_error) {}

  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    first_error_.Update(ops_.Prepare(params));
    return ops_.WorkspaceBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return ops_.AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace,
                       kernels::Stream&) override {
    UPIPE_CHECK(false) << NameOf(params) << " on a stand-in";
    return absl::OkStatus();
  }

 private:
  kernels::OpTable& ops_;
  absl::Status& first_error_;
};

}  // namespace

absl::Status CheckWorkspaces(const v1::RunPlan& plan, int rank, kernels::Device& device) {
  const v1::JobSpec& spec = plan.spec();
  absl::Status first_error;
  kernels::DryDevice dry(device.name(), std::make_unique<PreparingOps>(device.ops(), first_error),
                         std::make_unique<PreparingOps>(device.host_ops(), first_error));
  const engine::RankStreams streams = engine::RankStreams::Create(dry, rank);
  comm::DryCommunicator comm(rank, spec.parallel().ranks(),
                             {.compute = streams.compute.get(),
                              .ranks_per_node = spec.parallel().ranks_per_node(),
                              .reduce_room = comm::ReduceRoomOf(spec.parallel().backend())});
  const engine::RankContext context({.device = dry,
                                     .streams = streams,
                                     .comm = comm,
                                     .storage = model::StorageTypeOf(spec.train()),
                                     .mesh = parallel::Mesh::From(spec.parallel())});
  UPIPE_ASSIGN_OR_RETURN(auto step, TrainStep::Create(context, plan));
  const std::vector<HostTokens> micro_steps(spec.train().gradient_accumulation());
  UPIPE_RETURN_IF_ERROR(step->Run(1, micro_steps).status());
  if (spec.train().eval_sequences() > 0) UPIPE_RETURN_IF_ERROR(step->Evaluate(1, {}).status());
  return first_error;
}

}  // namespace upipe::train
