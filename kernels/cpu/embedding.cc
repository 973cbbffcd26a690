// Token lookup and its scatter-add. The backward splits columns over the pool, so every row sums in
// ascending token order whatever the number of threads.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/row_ops.h"

namespace upipe::kernels::cpu {
namespace {

constexpr int64_t kColumns = 16;  // of the backward; threads take multiples

absl::Status CheckTokens(const TensorView& tokens, int64_t vocab) {
  for (int64_t t = 0; t < tokens.shape[0]; ++t) {
    const int32_t token = tokens.as<int32_t>()[t];
    if (token < 0 || token >= vocab) {
      return absl::OutOfRangeError(absl::StrCat("embedding: token ", token, " at row ", t,
                                                " is outside the vocabulary [0, ", vocab, ")"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Backend::Run(const EmbeddingFwdParams& p, Workspace, ExecContext& context) {
  UPIPE_RETURN_IF_ERROR(CheckTokens(p.tokens, p.table.shape[0]));
  context.parallel.Run(p.out.shape[0], [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      CopyRow(p.table.At(p.tokens.as<int32_t>()[t]), p.table.dtype, p.out.At(t), p.out.dtype,
              p.out.shape[1], /*accumulate=*/false);
    }
  });
  return absl::OkStatus();
}

absl::Status Backend::Run(const EmbeddingBwdParams& p, Workspace, ExecContext& context) {
  UPIPE_RETURN_IF_ERROR(CheckTokens(p.tokens, p.dtable.shape[0]));
  const int64_t d = p.dout.shape[1];
  context.parallel.Run((d + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kColumns, last = std::min(d, end * kColumns);
    for (int64_t t = 0; t < p.dout.shape[0]; ++t) {
      CopyRow(p.dout.At(t, first), p.dout.dtype, p.dtable.At(p.tokens.as<int32_t>()[t], first),
              p.dtable.dtype, last - first, /*accumulate=*/true);
    }
  });
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
