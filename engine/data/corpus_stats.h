// Entropies of a token shard: what a model that knows only frequencies would reach as its loss.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "engine/data/token_shard.h"

namespace upipe::data {

// Entropies are in nats per token, document markers included, because a model's loss counts them
// too. They are measured with the counts of the very tokens they describe, so they are what the
// best possible unigram and bigram model of that text would reach: no other model of that kind, and
// none fitted to the training shard, gets below them.
struct CorpusStats {
  int64_t tokens = 0;
  int64_t documents = 0;
  double unigram_nats = 0;  // H(x_t)
  double bigram_nats = 0;   // H(x_t | x_{t-1}) over the tokens - 1 adjacent pairs
};

// Reads every token once. DataLoss for a token outside the vocabulary; InvalidArgument for a
// vocabulary above 4,096, whose table of pairs would pass 128 MiB.
absl::StatusOr<CorpusStats> MeasureCorpus(const TokenShard& shard);

}  // namespace upipe::data
