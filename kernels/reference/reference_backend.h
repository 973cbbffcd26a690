// The list of reference ops: what HostOpTable asks of a backend. Each op is in the file of its
// name.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/op_params.h"
#include "kernels/api/op_table.h"
#include "kernels/api/stream.h"

namespace upipe::kernels::reference {

struct Backend {
  // No reference op needs scratch.
  template <typename Params>
  static int64_t WorkspaceBytes(const Params&) {
    return 0;
  }
  static absl::Status Run(const EmbeddingFwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const EmbeddingBwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const RmsNormFwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const RmsNormBwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const MatmulParams& p, Workspace, ExecContext&);
  static absl::Status Run(const RopeParams& p, Workspace, ExecContext&);
  static absl::Status Run(const StridedCopyParams& p, Workspace, ExecContext&);
  static absl::Status Run(const AttentionFwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const AttentionBwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const RowDotParams& p, Workspace, ExecContext&);
  static absl::Status Run(const SwiGluFwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const SwiGluBwdParams& p, Workspace, ExecContext&);
  static absl::Status Run(const CrossEntropyParams& p, Workspace, ExecContext&);
  static absl::Status Run(const SumOfSquaresParams& p, Workspace, ExecContext&);
  static absl::Status Run(const ClipScaleParams& p, Workspace, ExecContext&);
  static absl::Status Run(const AdamWParams& p, Workspace, ExecContext&);
  static absl::Status Run(const FillParams& p, Workspace, ExecContext&);
  static absl::Status Run(const RandomNormalParams& p, Workspace, ExecContext&);
};

// Element (i, j, k) of an fp32 tensor.
inline float& At(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return *static_cast<float*>(view.At(i, j, k));
}

}  // namespace upipe::kernels::reference
