// How the sums of one query over the keys of a run leave: as its output and log-sum-exp, alone or
// joined to what o and lse hold over other keys (op_params.h, merge). Shared by the forward
// kernels.
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"

namespace upipe::kernels::cpu {

// o becomes kept * o + fresh * sums. Where kept is 0, o is not read.
struct RowWeights {
  float kept = 0;
  float fresh = 0;
  bool unchanged() const { return kept == 1 && fresh == 0; }
};

// Writes lse of query `token` and says what o becomes. `max` is the largest base-2 score, `sum`
// that of 2^(score - max), 0 when no key was seen. Weights are exponentials of differences from the
// larger log-sum-exp, so none exceeds 1.
RowWeights FinishRow(const AttentionFwdParams& p, int64_t head, int64_t token, float max,
                     float sum);

// Queries [first, first + count) of one head, which see no key: o = 0 and lse = -infinity, or as
// they were with merge.
void FinishUnseen(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count);

}  // namespace upipe::kernels::cpu
