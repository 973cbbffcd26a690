// The table of device operations. Each op is one params struct (op_params.h); a backend gives every
// params type a WorkspaceBytes and an Enqueue. Validation is shared (Validate), so every backend
// refuses the same bad params with the same sentence.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/api/op_params.h"
#include "kernels/api/stream.h"
#include "kernels/api/workspace.h"

namespace upipe::kernels {

// Arithmetic and traffic of one op call, from its params alone. Causal attention counts only the
// key/query pairs inside the mask.
struct OpCost {
  double flops = 0;
  double bytes_read = 0;
  double bytes_written = 0;
};

class OpTable {
 public:
  virtual ~OpTable() = default;
  // Pure. The dry table answers for the backend it stands in for.
  virtual int64_t WorkspaceBytes(const OpParams& params) const = 0;
  // Of that, what the backend's formulas say, measurements apart (scratch_table.h).
  virtual int64_t CountedBytes(const OpParams& params) const { return WorkspaceBytes(params); }
  // Those behind the ops and their versions, where results depend on them: "cuBLASLt 13.1, cuDNN
  // 9.19".
  virtual std::string libraries() const { return ""; }
  // True when this backend's attention backward reads the attention output beside delta, as cuDNN's
  // does: AttentionBwdParams.o must then be given. The dry table answers as above.
  virtual bool AttentionBwdReadsOutput() const { return false; }
  // At start, for a call of the step to come: readies what a library behind the op needs for it.
  // The scratch it really takes; FailedPrecondition where the library cannot do it. Never touches
  // the tensors. May take seconds.
  virtual absl::StatusOr<int64_t> Prepare(const OpParams& params) { return CountedBytes(params); }
  // Validates (InvalidArgument naming op and field), then submits to the stream. Never allocates
  // device memory, never blocks; later failures surface on the stream's events.
  virtual absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) = 0;
};

// Shapes, dtypes, strides and ranges; never touches data. InvalidArgument naming op, field and
// values.
absl::Status Validate(const OpParams& params);
OpCost Cost(const OpParams& params);
const char* NameOf(const OpParams& params);

}  // namespace upipe::kernels
