#include "kernels/cuda/fault.h"

#include "absl/strings/str_cat.h"

namespace upipe::kernels::cuda {

absl::Status FaultStatus(const FaultWords& words) {
  const auto [first, second] = words;
  const auto kind = static_cast<FaultKind>(second >> 32);
  if (kind == FaultKind::kNone) return absl::OkStatus();
  const char* what =
      kind == FaultKind::kEmbeddingToken ? "embedding: token " : "cross_entropy: label ";
  return absl::OutOfRangeError(absl::StrCat(what, static_cast<int32_t>(first), " at row ",
                                            first >> 32, " is outside the vocabulary [0, ",
                                            static_cast<uint32_t>(second), ")"));
}

}  // namespace upipe::kernels::cuda
