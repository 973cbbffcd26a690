// Which rank holds which tokens: the one owner of that question. Contexts are padded to a multiple
// of the ranks, never rounded down; the padding is one more document without labels.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::parallel {

struct TokenMap {
  int64_t context = 0;          // L, tokens of the sequence
  int64_t padded_context = 0;   // Lp, the next multiple of ranks
  int ranks = 1;                // C
  int64_t tokens_per_rank = 0;  // N = Lp / C

  static TokenMap Make(int64_t context, int ranks);

  // Global positions of the rank's tokens, in the order the rank holds them.
  kernels::PositionRun RunOf(int rank) const {
    return {rank * tokens_per_rank, (rank + 1) * tokens_per_rank};
  }
  // Causal within the sequence; padding sees only padding.
  kernels::AttentionMask Mask() const;
};

}  // namespace upipe::parallel
