// Which rank holds which tokens of a sequence: the one owner of that question (SCHEDULE "Tokens").
// Contexts are padded, never rounded down; the padding is one more document without labels.
//
// The padded context Lp is cut into 2R half-blocks; ring shard r is half-blocks r and 2R - 1 - r,
// in this order (R = 1: everything). Query chunk j is the j-th of n parts of the shard, and in each
// chunk Ulysses rank c holds the c-th of C pieces. A rank's tokens are its pieces of chunk 0, 1, ..
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::parallel {

struct TokenMapParams {
  int64_t context = 0;       // L, tokens of the sequence
  int ulysses_ranks = 1;     // C
  int ring_ranks = 1;        // R
  int64_t query_chunks = 1;  // n
};

struct TokenMap {
  int64_t context = 0;          // L
  int64_t padded_context = 0;   // Lp, a multiple of R * C * n, and of 2R when R > 1
  int ulysses_ranks = 1;        // C
  int ring_ranks = 1;           // R
  int64_t query_chunks = 1;     // n
  int64_t tokens_per_rank = 0;  // N = Lp / (R * C)

  static TokenMap Make(const TokenMapParams& params);

  int context_ranks() const { return ring_ranks * ulysses_ranks; }
  int64_t shard_tokens() const { return padded_context / ring_ranks; }     // M
  int64_t chunk_tokens() const { return shard_tokens() / query_chunks; }   // M / n
  int64_t piece_tokens() const { return tokens_per_rank / query_chunks; }  // N / n

  // Global positions of tokens [begin, end) of ring shard `ring_rank`, in shard order: one or two
  // runs, none empty, neighbours joined. [begin, end) within [0, M], not empty.
  std::vector<kernels::PositionRun> ShardRuns(int ring_rank, int64_t begin, int64_t end) const;
  // Global positions of the tokens of context rank `context_rank` (ring * C + ulysses), in the
  // order the rank holds them; neighbours joined.
  std::vector<kernels::PositionRun> RunsOf(int context_rank) const;
  // The mask of a sequence whose documents begin at `document_starts` (ascending from 0, all below
  // the context): the padding is one more document.
  kernels::AttentionMask Mask(bool causal, std::optional<int64_t> window,
                              std::vector<int64_t> document_starts) const;
};

}  // namespace upipe::parallel
