#include "engine/data/corpus_stats.h"

#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/types/span.h"

namespace upipe::data {
namespace {

constexpr uint32_t kMaxVocab = 4096;

// Sum of -c log(c / total) over the counts, in nats times total. 0 for no counts.
double SurprisalSum(absl::Span<const uint64_t> counts) {
  double total = 0;
  double sum_c_log_c = 0;
  for (const uint64_t count : counts) {
    if (count == 0) continue;
    total += static_cast<double>(count);
    sum_c_log_c += static_cast<double>(count) * std::log(static_cast<double>(count));
  }
  return total == 0 ? 0 : total * std::log(total) - sum_c_log_c;
}

}  // namespace

absl::StatusOr<CorpusStats> MeasureCorpus(const TokenShard& shard) {
  const size_t vocab = shard.vocab_size();
  if (vocab > kMaxVocab) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has a vocabulary of %u tokens, pairs are counted up to %u",
                        shard.path(), vocab, kMaxVocab));
  }
  const absl::Span<const uint16_t> tokens = shard.tokens();
  std::vector<uint64_t> counts(vocab);
  std::vector<uint64_t> pair_counts(vocab * vocab);  // [previous, next]
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] >= vocab) {
      return absl::DataLossError(absl::StrFormat("%s: token %u is %u, the vocabulary has %u",
                                                 shard.path(), i, tokens[i], vocab));
    }
    ++counts[tokens[i]];
    if (i > 0) ++pair_counts[tokens[i - 1] * vocab + tokens[i]];
  }
  CorpusStats stats{.tokens = shard.num_tokens(), .documents = shard.num_documents()};
  stats.unigram_nats = SurprisalSum(counts) / static_cast<double>(stats.tokens);
  double pair_sum = 0;
  for (size_t previous = 0; previous < vocab; ++previous) {
    pair_sum += SurprisalSum(absl::MakeConstSpan(pair_counts).subspan(previous * vocab, vocab));
  }
  if (stats.tokens > 1) stats.bigram_nats = pair_sum / static_cast<double>(stats.tokens - 1);
  return stats;
}

}  // namespace upipe::data
