// The list of CPU ops: what HostOpTable asks of a backend. Each op is in the file of its name.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/op_params.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"

namespace upipe::kernels::cpu {

struct Backend {
  template <typename Params>
  static int64_t WorkspaceBytes(const Params&) {
    return 0;
  }
  static int64_t WorkspaceBytes(const RmsNormBwdParams& p);    // partial sums of dweight
  static int64_t WorkspaceBytes(const MatmulParams& p);        // see matmul.cc
  static int64_t WorkspaceBytes(const ColumnSumParams& p);     // partial sums
  static int64_t WorkspaceBytes(const RopeParams& p);          // a table of angles
  static int64_t WorkspaceBytes(const CrossEntropyParams& p);  // one fp64 per row
  static int64_t WorkspaceBytes(const SumOfSquaresParams& p);  // one fp64 per block

  static absl::Status Run(const EmbeddingFwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const EmbeddingBwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const RmsNormFwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const RmsNormBwdParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const MatmulParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const ColumnSumParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const RopeParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const StridedCopyParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const AttentionFwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const AttentionBwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const RowDotParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const SwiGluFwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const SwiGluBwdParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const CrossEntropyParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const SumOfSquaresParams& p, Workspace workspace, ExecContext& context);
  static absl::Status Run(const ClipScaleParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const AdamWParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const FillParams& p, Workspace, ExecContext& context);
  static absl::Status Run(const RandomNormalParams& p, Workspace, ExecContext& context);
};

// Address of element (i, j, k) of a tensor of Ts.
template <typename T = float>
T* Ptr(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return static_cast<T*>(view.At(i, j, k));
}

}  // namespace upipe::kernels::cpu
