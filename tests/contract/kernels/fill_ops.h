// The smallest op table: fill and strided copy of contiguous tensors, so that the contract of
// devices can be tested without any backend.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "kernels/host/host_op_table.h"

namespace upipe::kernels {

struct FillBackend {
  static constexpr int64_t kFillWorkspaceBytes = 96;

  static int64_t WorkspaceBytes(const FillParams&) { return kFillWorkspaceBytes; }
  static absl::Status Run(const FillParams& p, Workspace workspace, ExecContext& context) {
    std::memset(workspace.data, 0x11, static_cast<size_t>(workspace.size_bytes));
    context.parallel.Run(p.dst.num_elements(), [&](int64_t begin, int64_t end, int) {
      std::fill(p.dst.as<float>() + begin, p.dst.as<float>() + end, static_cast<float>(p.value));
    });
    return absl::OkStatus();
  }

  static int64_t WorkspaceBytes(const StridedCopyParams&) { return 0; }
  static absl::Status Run(const StridedCopyParams& p, Workspace, ExecContext& context) {
    context.parallel.Run(p.src.num_elements(), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        p.dst.as<float>()[i] = p.src.as<float>()[i] + (p.accumulate ? p.dst.as<float>()[i] : 0.0f);
      }
    });
    return absl::OkStatus();
  }

  template <typename P>
  static int64_t WorkspaceBytes(const P&) {
    return 0;
  }
  template <typename P>
  static absl::Status Run(const P& p, Workspace, ExecContext&) {
    return absl::UnimplementedError(NameOf(p));
  }
};

using FillOpTable = HostOpTable<FillBackend>;

}  // namespace upipe::kernels
