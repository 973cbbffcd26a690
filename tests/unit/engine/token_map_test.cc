// Which rank holds which token: every position exactly once whatever the axes, chunks in position
// order after the Ulysses exchange, even causal work on the ring, padding unlabelled and apart.
// PeersN_ names the user issue of research/peers.md part 7 that a test answers.
#include "engine/parallel/token_map.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

namespace upipe::parallel {
namespace {

using kernels::PositionRun;

std::vector<int64_t> Positions(const std::vector<PositionRun>& runs) {
  std::vector<int64_t> positions;
  for (const PositionRun& run : runs) {
    for (int64_t p = run.begin; p < run.end; ++p) positions.push_back(p);
  }
  return positions;
}

std::string Name(const TokenMapParams& p) {
  return absl::StrCat("L", p.context, " C", p.ulysses_ranks, " R", p.ring_ranks, " n",
                      p.query_chunks);
}

std::vector<TokenMapParams> AllParams() {
  std::vector<TokenMapParams> all;
  for (int64_t context : {1, 2, 3, 7, 8, 23, 24, 36, 47, 48, 61, 96, 97, 144}) {
    for (int c = 1; c <= 5; ++c) {
      for (int r = 1; r <= 4; ++r) {
        for (int64_t n = 1; n <= 4; ++n) all.push_back({context, c, r, n});
      }
    }
  }
  return all;
}

// The definition, position by position: of token i of ring shard r.
int64_t PositionOf(const TokenMap& map, int r, int64_t i) {
  if (map.ring_ranks == 1) return i;
  const int64_t half = map.padded_context / (2 * map.ring_ranks);
  return i < half ? r * half + i : (2 * map.ring_ranks - 1 - r) * half + (i - half);
}

TEST(TokenMap, Peers25_ContextsArePaddedByLessThanTheMultipleAndNeverRoundedDown) {
  for (const TokenMapParams& params : AllParams()) {
    SCOPED_TRACE(Name(params));
    const TokenMap map = TokenMap::Make(params);
    const int64_t pieces = params.ring_ranks * params.ulysses_ranks * params.query_chunks;
    int64_t padded = params.context;
    while (padded % pieces != 0 || (params.ring_ranks > 1 && padded % (2 * params.ring_ranks) != 0))
      ++padded;
    ASSERT_EQ(map.context, params.context);
    ASSERT_EQ(map.padded_context, padded);
    ASSERT_EQ(map.tokens_per_rank * map.context_ranks(), padded);
    ASSERT_EQ(map.shard_tokens() * params.ring_ranks, padded);
    ASSERT_EQ(map.chunk_tokens() * params.query_chunks, map.shard_tokens());
    ASSERT_EQ(map.piece_tokens() * params.query_chunks, map.tokens_per_rank);
  }
}

TEST(TokenMap, Peers22_Peers30_UnshardOfShardIsTheSequence) {
  for (const TokenMapParams& params : AllParams()) {
    SCOPED_TRACE(Name(params));
    const TokenMap map = TokenMap::Make(params);
    std::vector<int64_t> sequence(map.padded_context), back(map.padded_context, -1);
    std::iota(sequence.begin(), sequence.end(), 1000);
    for (int rank = 0; rank < map.context_ranks(); ++rank) {
      const std::vector<int64_t> positions = Positions(map.RunsOf(rank));
      ASSERT_EQ(static_cast<int64_t>(positions.size()), map.tokens_per_rank);
      std::vector<int64_t> shard;
      for (int64_t p : positions) shard.push_back(sequence.at(p));
      for (size_t i = 0; i < shard.size(); ++i) {
        ASSERT_EQ(back[positions[i]], -1) << "position " << positions[i] << " is held twice";
        back[positions[i]] = shard[i];
      }
    }
    ASSERT_EQ(back, sequence);
  }
}

TEST(TokenMap, Peers16_ShardRunsAreTheZigzagPositions) {
  for (const TokenMapParams& params : AllParams()) {
    SCOPED_TRACE(Name(params));
    const TokenMap map = TokenMap::Make(params);
    const int64_t m = map.shard_tokens();
    for (int r = 0; r < map.ring_ranks; ++r) {
      for (int64_t begin = 0; begin < m; ++begin) {
        for (int64_t end = begin + 1; end <= m; end += 1 + m / 7) {
          const std::vector<PositionRun> runs = map.ShardRuns(r, begin, end);
          ASSERT_LE(runs.size(), 2u);
          ASSERT_TRUE(runs.size() == 1 || runs[0].end != runs[1].begin) << "neighbours are apart";
          for (const PositionRun& run : runs) ASSERT_LT(run.begin, run.end);
          std::vector<int64_t> expected;
          for (int64_t i = begin; i < end; ++i) expected.push_back(PositionOf(map, r, i));
          ASSERT_EQ(Positions(runs), expected) << "shard " << r << " [" << begin << ", " << end;
        }
      }
    }
  }
}

// What the rows of rank c are in the exchange of chunk j: its j-th piece.
TEST(TokenMap, Peers22_EveryChunksAllToAllLandsInPositionOrder) {
  for (const TokenMapParams& params : AllParams()) {
    SCOPED_TRACE(Name(params));
    const TokenMap map = TokenMap::Make(params);
    for (int r = 0; r < map.ring_ranks; ++r) {
      for (int64_t j = 0; j < map.query_chunks; ++j) {
        std::vector<int64_t> landed;
        for (int c = 0; c < map.ulysses_ranks; ++c) {
          const auto held = Positions(map.RunsOf(r * map.ulysses_ranks + c));
          const auto piece = held.begin() + j * map.piece_tokens();
          landed.insert(landed.end(), piece, piece + map.piece_tokens());
        }
        const auto runs = map.ShardRuns(r, j * map.chunk_tokens(), (j + 1) * map.chunk_tokens());
        ASSERT_EQ(landed, Positions(runs)) << "ring rank " << r << " chunk " << j;
      }
    }
  }
}

TEST(TokenMap, RunsOfARankAreJoined) {
  EXPECT_EQ(TokenMap::Make({24, 1, 1, 4}).RunsOf(0).size(), 1u);  // C = 1: chunks are neighbours
  EXPECT_EQ(TokenMap::Make({24, 2, 1, 3}).RunsOf(1).size(), 3u);
  EXPECT_EQ(TokenMap::Make({24, 1, 3, 2}).RunsOf(0).size(), 2u);
  EXPECT_EQ(TokenMap::Make({24, 1, 3, 2}).RunsOf(2).size(), 1u);  // the two middle half-blocks
}

int64_t CausalPairs(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys) {
  int64_t pairs = 0;
  for (int64_t q : queries) {
    for (int64_t k : keys) pairs += k <= q ? 1 : 0;
  }
  return pairs;
}

TEST(TokenMap, CausalWorkOfRingShardsIsEvenAtEveryHop) {
  for (int ring_ranks = 2; ring_ranks <= 5; ++ring_ranks) {
    const TokenMap map = TokenMap::Make({20 * ring_ranks, 1, ring_ranks, 1});
    for (int hop = 0; hop < ring_ranks; ++hop) {
      std::vector<int64_t> work;
      for (int r = 0; r < ring_ranks; ++r) {
        const int from = (r - hop + ring_ranks) % ring_ranks;
        work.push_back(CausalPairs(Positions(map.ShardRuns(r, 0, map.shard_tokens())),
                                   Positions(map.ShardRuns(from, 0, map.shard_tokens()))));
      }
      EXPECT_EQ(work, std::vector<int64_t>(ring_ranks, work[0])) << "hop " << hop;
      EXPECT_GT(work[0], 0);
    }
  }
}

TEST(TokenMap, PaddingIsADocumentOfItsOwn) {
  const kernels::AttentionMask even = TokenMap::Make({12, 4}).Mask(true, std::nullopt, {0});
  EXPECT_TRUE(even.causal);
  EXPECT_FALSE(even.window.has_value());
  EXPECT_EQ(*even.document_starts, std::vector<int64_t>({0}));
  EXPECT_EQ(even.total, 12);
  const kernels::AttentionMask padded = TokenMap::Make({10, 4}).Mask(true, std::nullopt, {0});
  EXPECT_EQ(*padded.document_starts, std::vector<int64_t>({0, 10}));
  EXPECT_EQ(padded.total, 12);
  const kernels::AttentionMask one = TokenMap::Make({1, 4}).Mask(true, std::nullopt, {0});
  EXPECT_EQ(*one.document_starts, std::vector<int64_t>({0, 1}));
  EXPECT_EQ(one.total, 4);
}

TEST(TokenMap, Peers29_TheMaskIsTheOneAskedFor) {
  const kernels::AttentionMask mask = TokenMap::Make({10, 2, 2}).Mask(false, 3, {0, 4, 7});
  EXPECT_FALSE(mask.causal);
  EXPECT_EQ(mask.window, 3);
  EXPECT_EQ(*mask.document_starts, std::vector<int64_t>({0, 4, 7, 10}));
  EXPECT_EQ(mask.total, 12);
}

TEST(TokenMapDeathTest, DocumentsAscendFromZeroBelowTheContext) {
  const TokenMap map = TokenMap::Make({10, 4});
  for (const std::vector<int64_t>& starts :
       std::vector<std::vector<int64_t>>{{}, {1}, {0, 5, 5}, {0, 6, 5}, {0, 10}}) {
    EXPECT_DEATH(map.Mask(true, std::nullopt, starts), "document starts");
  }
}

TEST(TokenMap, MillionsOfTokensDoNotOverflow) {
  const TokenMap map = TokenMap::Make({(int64_t{1} << 40) - 1, 512, 2, 8});
  EXPECT_EQ(map.padded_context, int64_t{1} << 40);
  EXPECT_EQ(map.RunsOf(511).back().end, int64_t{1} << 40);
  EXPECT_EQ(map.RunsOf(512).front().begin, int64_t{1} << 38);
}

}  // namespace
}  // namespace upipe::parallel
