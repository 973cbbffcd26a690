// AttentionMask as intervals. The keys a query sees, and the queries a key is seen by, are each one
// interval whose ends never move back as the position grows; tiles are skipped, taken whole or
// masked by comparing those ends.
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"

namespace upipe::kernels::cpu {

PositionRun VisibleKeys(const AttentionMask& mask, int64_t query);
PositionRun VisibleQueries(const AttentionMask& mask, int64_t key);

// Of `keys`, those that some query of the run sees, and of `queries`, those that see some key of
// the run: one interval each, begin = end when there is none.
PositionRun KeysSeen(const AttentionMask& mask, PositionRun queries, PositionRun keys);
PositionRun QueriesSeeing(const AttentionMask& mask, PositionRun keys, PositionRun queries);

// The part of both runs; begin = end when there is none.
PositionRun Intersection(PositionRun a, PositionRun b);

// True when every query of the (nonempty) run sees every key of the (nonempty) run.
bool SeesAll(const AttentionMask& mask, PositionRun queries, PositionRun keys);

// Splits [0, count) into blocks of which contiguous pieces hold like shares of causal work: first,
// last, second, ...
inline int64_t BalancedBlock(int64_t index, int64_t count) {
  return index % 2 == 0 ? index / 2 : count - 1 - index / 2;
}

}  // namespace upipe::kernels::cpu
