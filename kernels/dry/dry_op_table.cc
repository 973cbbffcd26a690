#include "kernels/dry/dry_op_table.h"

#include <utility>

#include "common/status.h"
#include "kernels/api/workspace_check.h"

namespace upipe::kernels {

DryOpTable::DryOpTable(std::unique_ptr<OpTable> stands_for, DryCounts* counts)
    : stands_for_(std::move(stands_for)), counts_(counts) {}

int64_t DryOpTable::WorkspaceBytes(const OpParams& params) const {
  return stands_for_->WorkspaceBytes(params);
}

absl::Status DryOpTable::Enqueue(const OpParams& params, Workspace workspace, Stream&) {
  UPIPE_RETURN_IF_ERROR(Validate(params));
  UPIPE_RETURN_IF_ERROR(CheckWorkspace(params, workspace, WorkspaceBytes(params)));
  const OpCost cost = Cost(params);
  counts_->by_op[NameOf(params)].Add(cost);
  counts_->total.Add(cost);
  return absl::OkStatus();
}

}  // namespace upipe::kernels
