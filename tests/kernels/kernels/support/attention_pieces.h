// One attention call in pieces, as rings and chunks run it.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/api/op_table.h"
#include "tests/kernels/kernels/support/memory.h"

namespace upipe::kernels::testing {

// `pieces` runs that make up the run, uneven, none a multiple of a tile; in ascending order.
std::vector<PositionRun> Split(PositionRun run, int64_t pieces);

AttentionFwdParams PieceOf(const AttentionFwdParams& p, PositionRun queries, PositionRun keys);
AttentionBwdParams PieceOf(const AttentionBwdParams& p, PositionRun queries, PositionRun keys);

// How one call is cut: the key runs in the order they arrive in, for every query run in turn.
struct Cut {
  std::vector<PositionRun> queries;
  std::vector<PositionRun> keys;
  int threads = 1;
};

// Runs the pieces; a failure of any is one of the test.
void Run(OpTable& ops, const AttentionFwdParams& p, const Cut& cut, const Memory& memory);
void Run(OpTable& ops, const AttentionBwdParams& p, const Cut& cut, const Memory& memory);

template <typename Params>
std::vector<Memory::Result> ResultsOf(OpTable& ops, const Params& p, const Cut& cut,
                                      Memory& memory) {
  memory.Restore();
  Run(ops, p, cut, memory);
  return memory.Results();
}

}  // namespace upipe::kernels::testing
