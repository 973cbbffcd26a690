// The one sentence for a scratch block that is too small, shared by every OpTable.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/op_table.h"

namespace upipe::kernels {

// InvalidArgument naming the op and both sizes when `workspace` is smaller than `needed_bytes`.
absl::Status CheckWorkspace(const OpParams& params, Workspace workspace, int64_t needed_bytes);

}  // namespace upipe::kernels
