// Token lookup and its scatter-add.
#include "absl/strings/str_cat.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

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

absl::Status Backend::Run(const EmbeddingFwdParams& p, Workspace, ExecContext&) {
  if (absl::Status ok = CheckTokens(p.tokens, p.table.shape[0]); !ok.ok()) return ok;
  for (int64_t t = 0; t < p.out.shape[0]; ++t) {
    const int32_t token = p.tokens.as<int32_t>()[t];
    for (int64_t i = 0; i < p.out.shape[1]; ++i) At(p.out, t, i) = At(p.table, token, i);
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const EmbeddingBwdParams& p, Workspace, ExecContext&) {
  if (absl::Status ok = CheckTokens(p.tokens, p.dtable.shape[0]); !ok.ok()) return ok;
  for (int64_t t = 0; t < p.dout.shape[0]; ++t) {
    const int32_t token = p.tokens.as<int32_t>()[t];
    for (int64_t i = 0; i < p.dout.shape[1]; ++i) At(p.dtable, token, i) += At(p.dout, t, i);
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
