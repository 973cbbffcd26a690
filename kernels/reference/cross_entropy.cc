// Summed token losses and their gradient.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {

absl::Status Backend::Run(const CrossEntropyParams& p, Workspace, ExecContext&) {
  const int64_t vocab = p.logits.shape[1];
  double* loss_and_count = p.loss_and_count.as<double>();
  for (int64_t t = 0; t < p.logits.shape[0]; ++t) {
    const int32_t label = p.labels.as<int32_t>()[t];
    if (label >= vocab) {
      return absl::OutOfRangeError(absl::StrCat("cross_entropy: label ", label, " at row ", t,
                                                " is outside the vocabulary [0, ", vocab, ")"));
    }
    double max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < vocab; ++i) max = std::max(max, double{At(p.logits, t, i)});
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(At(p.logits, t, i) - max);
    if (label >= 0) {
      loss_and_count[0] += max + std::log(sum) - At(p.logits, t, label);
      loss_and_count[1] += 1;
    }
    // A gradient over its own logits lies at or before the logit it is of, so ascending i is safe.
    for (int64_t i = 0; p.dlogits.present() && i < vocab; ++i) {
      const double gradient = std::exp(At(p.logits, t, i) - max) / sum - (i == label ? 1.0 : 0.0);
      At(p.dlogits, t, i) = label >= 0 ? gradient : 0.0;
    }
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
