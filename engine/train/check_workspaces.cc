#include "engine/train/check_workspaces.h"

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/failpoint.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/train/measured_workspaces.h"
#include "engine/train/step.h"
#include "kernels/api/scratch_table.h"
#include "kernels/dry/dry_device.h"

namespace upipe::train {
namespace {

// What a failing failpoint makes of an op's scratch: another library might.
int64_t MoreThan(int64_t bytes) { return 2 * bytes + (int64_t{16} << 20); }

// Scratch of every op that was prepared, and the first that takes more than the plan gives it.
class Measurement {
 public:
  void Take(const kernels::OpParams& params, kernels::OpTable& ops) {
    const std::optional<kernels::ScratchShape> shape = kernels::ScratchShapeOf(params);
    absl::StatusOr<int64_t> bytes = ops.Prepare(params);
    if (!bytes.ok()) return status_.Update(bytes.status());
    if (!shape.has_value()) return;
    if (!Failpoint(failpoints::kTrainerWorkspace).ok()) *bytes = MoreThan(*bytes);
    const int64_t counted = ops.CountedBytes(params), planned = ops.WorkspaceBytes(params);
    table_.Add(*shape, {.counted = counted, .measured = *bytes});
    if (*bytes <= planned) return;
    exceeded_.Update(absl::ResourceExhaustedError(
        absl::StrCat(shape->op, " of [", absl::StrJoin(shape->sizes, ", "), "] takes ",
                     FormatBytes(*bytes), " (", *bytes, " bytes) of scratch here, ",
                     FormatBytes(planned), " (", planned, " bytes) are planned")));
  }

  // What cannot be done at all comes first: no other plan helps.
  absl::Status status() const { return status_.ok() ? exceeded_ : status_; }
  const kernels::ScratchTable& table() const { return table_; }

 private:
  kernels::ScratchTable table_;
  absl::Status status_, exceeded_;
};

// Stands in for a device's ops in a dry run, and has it prepare each as its scratch is asked for.
class PreparingOps final : public kernels::OpTable {
 public:
  PreparingOps(kernels::OpTable& ops, Measurement& measurement)
      : ops_(ops), measurement_(measurement) {}

  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    measurement_.Take(params, ops_);
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
  Measurement& measurement_;
};

// Documents such as a step may have, in all the ways in which they can lie to the runs of tokens:
// the longest there are, their ends where runs end and where they do not.
std::vector<std::vector<int64_t>> DocumentsToPrepare(const v1::RunPlan& plan) {
  if (plan.documents_max() <= 1) return {{0}};
  const int64_t length = std::max<int64_t>(plan.document_tokens_max(), 1);
  std::vector<std::vector<int64_t>> ways;
  for (const int64_t first : {length, length / 2 + 1}) {
    std::vector<int64_t>& starts = ways.emplace_back(1, 0);
    const int64_t context = plan.spec().train().context();
    for (int64_t at = first; at < context; at += length) starts.push_back(at);
  }
  return ways;
}

absl::Status PrepareStep(const v1::RunPlan& plan, int rank, kernels::Device& device,
                         Measurement& measurement) {
  const v1::JobSpec& spec = plan.spec();
  kernels::DryDevice dry(device.name(), std::make_unique<PreparingOps>(device.ops(), measurement),
                         std::make_unique<PreparingOps>(device.host_ops(), measurement));
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
  for (std::vector<int64_t>& starts : DocumentsToPrepare(plan)) {
    const HostTokens tokens = {.document_starts = std::move(starts)};
    const std::vector<HostTokens> micro_steps(spec.train().gradient_accumulation(), tokens);
    UPIPE_RETURN_IF_ERROR(step->Run(1, micro_steps).status());
    if (spec.train().eval_sequences() > 0) {
      UPIPE_RETURN_IF_ERROR(step->Evaluate(1, tokens).status());
    }
  }
  return absl::OkStatus();
}

}  // namespace

WorkspaceCheck CheckWorkspaces(const v1::RunPlan& plan, int rank, kernels::Device& device) {
  Measurement measurement;
  WorkspaceCheck check;
  check.status = PrepareStep(plan, rank, device, measurement);
  check.status.Update(measurement.status());
  if (!absl::IsResourceExhausted(check.status)) return check;
  // Ranks apart in the outer axes take the same ops.
  const int context_ranks = parallel::Mesh::From(plan.spec().parallel()).context_ranks();
  for (int other = 0; other < context_ranks; ++other) {
    const absl::Status prepared = PrepareStep(plan, other, device, measurement);
    if (!prepared.ok()) return {.status = prepared};
  }
  check.measured = ToMessage(measurement.table(), device.hardware());
  return check;
}

}  // namespace upipe::train
