#include "kernels/api/workspace_check.h"

#include "absl/strings/str_cat.h"

namespace upipe::kernels {

absl::Status CheckWorkspace(const OpParams& params, Workspace workspace, int64_t needed_bytes) {
  if (workspace.size_bytes < needed_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(params), ": workspace has ", workspace.size_bytes, " bytes, needs ",
                     needed_bytes, "; allocate OpTable::WorkspaceBytes(params) bytes"));
  }
  if (needed_bytes > 0 && workspace.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(params), ": workspace of ", needed_bytes, " bytes has no address"));
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels
