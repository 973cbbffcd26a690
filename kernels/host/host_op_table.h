// Makes an OpTable for a device whose streams run ordinary functions. A backend writes one Run and
// one WorkspaceBytes per params struct; validation, the workspace check and the submission are
// here, once.
#pragma once

#include <cstdint>
#include <variant>

#include "absl/status/status.h"
#include "common/status.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"
#include "kernels/api/workspace_check.h"

namespace upipe::kernels {

// Backend is a small copyable value (usually an empty struct) with, for every type P of OpParams,
//
//   static int64_t WorkspaceBytes(const P& params);                                  // pure
//   static absl::Status Run(const P& params, Workspace workspace, ExecContext& ctx); // on the
//   stream
//
// as overloads (const members work too). Run sees validated params and at least
// WorkspaceBytes(params) bytes of scratch, and returns only once the op is complete. Create it as
// std::make_unique<HostOpTable<CpuBackend>>().
template <typename Backend>
class HostOpTable final : public OpTable {
 public:
  explicit HostOpTable(Backend backend = Backend()) : backend_(backend) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return std::visit([this](const auto& p) -> int64_t { return backend_.WorkspaceBytes(p); },
                      params);
  }

  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    UPIPE_RETURN_IF_ERROR(Validate(params));
    UPIPE_RETURN_IF_ERROR(CheckWorkspace(params, workspace, WorkspaceBytes(params)));
    std::visit(
        [&](const auto& p) {
          stream.Submit([backend = backend_, p, workspace](ExecContext& context) {
            return backend.Run(p, workspace, context);
          });
        },
        params);
    return absl::OkStatus();
  }

 private:
  Backend backend_;
};

}  // namespace upipe::kernels
