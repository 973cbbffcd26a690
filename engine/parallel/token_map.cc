#include "engine/parallel/token_map.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "common/check.h"

namespace upipe::parallel {
namespace {

void AppendJoined(std::vector<kernels::PositionRun>& runs, const kernels::PositionRun& run) {
  if (run.begin == run.end) return;
  if (!runs.empty() && runs.back().end == run.begin) {
    runs.back().end = run.end;
  } else {
    runs.push_back(run);
  }
}

}  // namespace

TokenMap TokenMap::Make(const TokenMapParams& params) {
  const int64_t c = params.ulysses_ranks, r = params.ring_ranks, n = params.query_chunks;
  UPIPE_CHECK(params.context > 0 && c > 0 && r > 0 && n > 0)
      << params.context << " tokens on " << c << " Ulysses x " << r << " ring ranks in " << n
      << " query chunks";
  const int64_t multiple = r > 1 ? r * std::lcm(c * n, int64_t{2}) : c * n;
  const int64_t padded = (params.context + multiple - 1) / multiple * multiple;
  return {.context = params.context,
          .padded_context = padded,
          .ulysses_ranks = params.ulysses_ranks,
          .ring_ranks = params.ring_ranks,
          .query_chunks = n,
          .tokens_per_rank = padded / (r * c)};
}

std::vector<kernels::PositionRun> TokenMap::ShardRuns(int ring_rank, int64_t begin,
                                                      int64_t end) const {
  UPIPE_CHECK(ring_rank >= 0 && ring_rank < ring_ranks && begin >= 0 && begin < end &&
              end <= shard_tokens())
      << "tokens [" << begin << ", " << end << ") of ring shard " << ring_rank << ": there are "
      << ring_ranks << " shards of " << shard_tokens() << " tokens";
  if (ring_ranks == 1) return {{begin, end}};
  const int64_t half = shard_tokens() / 2;
  const int64_t first = ring_rank * half;                          // position of token 0
  const int64_t second = (2 * ring_ranks - 2 - ring_rank) * half;  // and of token `half`, less half
  std::vector<kernels::PositionRun> runs;
  AppendJoined(runs, {first + std::min(begin, half), first + std::min(end, half)});
  AppendJoined(runs, {second + std::max(begin, half), second + std::max(end, half)});
  return runs;
}

std::vector<kernels::PositionRun> TokenMap::RunsOf(int context_rank) const {
  UPIPE_CHECK(context_rank >= 0 && context_rank < context_ranks())
      << "rank " << context_rank << " of " << context_ranks();
  const int ulysses = context_rank % ulysses_ranks;
  std::vector<kernels::PositionRun> runs;
  for (int64_t chunk = 0; chunk < query_chunks; ++chunk) {
    const int64_t begin = chunk * chunk_tokens() + ulysses * piece_tokens();
    for (const auto& run : ShardRuns(context_rank / ulysses_ranks, begin, begin + piece_tokens())) {
      AppendJoined(runs, run);
    }
  }
  return runs;
}

kernels::AttentionMask TokenMap::Mask(bool causal, std::optional<int64_t> window,
                                      std::vector<int64_t> document_starts) const {
  UPIPE_CHECK(!document_starts.empty() && document_starts.front() == 0 &&
              std::adjacent_find(document_starts.begin(), document_starts.end(),
                                 std::greater_equal<int64_t>()) == document_starts.end() &&
              document_starts.back() < context)
      << document_starts.size() << " document starts are not ascending from 0 below " << context;
  if (padded_context > context) document_starts.push_back(context);
  return {
      .causal = causal,
      .window = window,
      .document_starts = std::make_shared<const std::vector<int64_t>>(std::move(document_starts)),
      .total = padded_context};
}

}  // namespace upipe::parallel
