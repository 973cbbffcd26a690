#include "kernels/dry/dry_op_table.h"

#include <algorithm>

#include "common/status.h"
#include "kernels/api/workspace_check.h"

namespace upipe::kernels {
namespace {

// Keys of the run that the mask's window reaches, at most.
int64_t KeysSeen(const PositionRun& keys, const AttentionMask& mask) {
  const int64_t length = keys.end - keys.begin;
  return mask.window.has_value() ? std::min(length, *mask.window) : length;
}

// What of a call's cost its time depends on beside FLOPs and bytes.
void Describe(const OpParams& params, DryCalls& call) {
  if (const auto* matmul = std::get_if<MatmulParams>(&params)) {
    call.dtype = matmul->a.dtype;
    call.extent = matmul->c.shape[0];
  } else if (const auto* forward = std::get_if<AttentionFwdParams>(&params)) {
    call.dtype = forward->q.dtype;
    call.extent = KeysSeen(forward->keys, forward->mask);
  } else if (const auto* backward = std::get_if<AttentionBwdParams>(&params)) {
    call.dtype = backward->q.dtype;
    call.extent = KeysSeen(backward->keys, backward->mask);
  }
}

}  // namespace

absl::Status DryOpTable::Enqueue(const OpParams& params, Workspace workspace, Stream&) {
  UPIPE_RETURN_IF_ERROR(Validate(params));
  UPIPE_RETURN_IF_ERROR(CheckWorkspace(params, workspace, WorkspaceBytes(params)));
  DryCalls call{.op = static_cast<int>(params.index()),
                .on_host = on_host_,
                .cost = Cost(params),
                .calls = 1};
  Describe(params, call);
  (*counts_)->Add(call);
  return absl::OkStatus();
}

}  // namespace upipe::kernels
