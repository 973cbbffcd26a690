// How many query/key pairs a mask leaves: the arithmetic of one attention call, exactly.
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"

namespace upipe::kernels {

// Pairs (q, k), q in `queries`, k in `keys`, that `mask` lets see each other. Takes time linear in
// the documents that reach the query run, not in tokens.
int64_t VisiblePairs(const AttentionMask& mask, PositionRun queries, PositionRun keys);

}  // namespace upipe::kernels
