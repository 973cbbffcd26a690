// Which rank holds which token: every position exactly once, padding unlabelled and apart.
#include "engine/parallel/token_map.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace upipe::parallel {
namespace {

TEST(TokenMap, UnshardOfShardIsTheSequence) {
  for (int64_t context = 1; context <= 40; ++context) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      SCOPED_TRACE(::testing::Message() << context << " tokens on " << ranks << " ranks");
      const TokenMap map = TokenMap::Make(context, ranks);
      ASSERT_EQ(map.context, context);
      ASSERT_EQ(map.ranks, ranks);
      ASSERT_EQ(map.padded_context % ranks, 0);
      ASSERT_GE(map.padded_context, context);  // never rounded down
      ASSERT_LT(map.padded_context - context, ranks);
      ASSERT_EQ(map.tokens_per_rank * ranks, map.padded_context);
      std::vector<int64_t> sequence(map.padded_context), back(map.padded_context, -1);
      std::iota(sequence.begin(), sequence.end(), 1000);
      for (int rank = 0; rank < ranks; ++rank) {
        const kernels::PositionRun run = map.RunOf(rank);
        ASSERT_EQ(run.end - run.begin, map.tokens_per_rank);
        const std::vector<int64_t> shard(sequence.begin() + run.begin, sequence.begin() + run.end);
        for (int64_t i = 0; i < map.tokens_per_rank; ++i) {
          ASSERT_EQ(back[run.begin + i], -1) << "position " << run.begin + i << " is held twice";
          back[run.begin + i] = shard[i];
        }
      }
      ASSERT_EQ(back, sequence);
    }
  }
}

TEST(TokenMap, PaddingIsADocumentOfItsOwn) {
  const kernels::AttentionMask even = TokenMap::Make(12, 4).Mask();
  EXPECT_TRUE(even.causal);
  EXPECT_FALSE(even.window.has_value());
  EXPECT_EQ(*even.document_starts, std::vector<int64_t>({0}));
  EXPECT_EQ(even.total, 12);
  const kernels::AttentionMask padded = TokenMap::Make(10, 4).Mask();
  EXPECT_EQ(*padded.document_starts, std::vector<int64_t>({0, 10}));
  EXPECT_EQ(padded.total, 12);
  const kernels::AttentionMask one = TokenMap::Make(1, 4).Mask();
  EXPECT_EQ(*one.document_starts, std::vector<int64_t>({0, 1}));
  EXPECT_EQ(one.total, 4);
}

TEST(TokenMap, MillionsOfTokensDoNotOverflow) {
  const TokenMap map = TokenMap::Make((int64_t{1} << 40) - 1, 1024);
  EXPECT_EQ(map.padded_context, int64_t{1} << 40);
  EXPECT_EQ(map.RunOf(1023).end, int64_t{1} << 40);
}

}  // namespace
}  // namespace upipe::parallel
