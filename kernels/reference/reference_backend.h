// The list of reference ops: what HostOpTable asks of a backend. Each op is in the file of its
// name.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/bfloat16.h"
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
  static absl::Status Run(const ColumnSumParams& p, Workspace, ExecContext&);
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

// One element of an fp32 or bf16 tensor: reads as a float, rounds what it is given to its type.
class Element {
 public:
  Element(void* data, DType dtype) : data_(data), dtype_(dtype) {}
  Element(const Element&) = default;

  operator float() const {  // NOLINT: implicit, so that an op reads as its formula
    return dtype_ == DType::kBFloat16 ? static_cast<const BFloat16*>(data_)->ToFloat()
                                      : *static_cast<const float*>(data_);
  }
  Element& operator=(double value) { return Store(static_cast<float>(value)); }
  Element& operator=(const Element& other) { return Store(other); }
  Element& operator+=(double value) { return *this = *this + value; }

 private:
  Element& Store(float value) {
    if (dtype_ == DType::kBFloat16) {
      *static_cast<BFloat16*>(data_) = BFloat16::From(value);
    } else {
      *static_cast<float*>(data_) = value;
    }
    return *this;
  }

  void* const data_;
  const DType dtype_;
};

// Element (i, j, k) of a tensor.
inline Element At(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0) {
  return Element(view.At(i, j, k), view.dtype);
}

}  // namespace upipe::kernels::reference
