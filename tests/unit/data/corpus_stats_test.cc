// Entropies against closed forms and a naive computation from probabilities.
#include "engine/data/corpus_stats.h"

#include <cmath>
#include <map>
#include <random>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/data/shard_bytes.h"

namespace upipe::data {
namespace {

TEST(CorpusStats, OneTokenHasNoEntropy) {
  const auto stats = MeasureCorpus(MakeShard({256}));
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->tokens, 1);
  EXPECT_EQ(stats->documents, 1);
  EXPECT_EQ(stats->unigram_nats, 0);
  EXPECT_EQ(stats->bigram_nats, 0);
}

TEST(CorpusStats, ACycleIsUniformButPredictable) {
  const auto stats = MeasureCorpus(*ShardFromBytes(ShardBytes({0, 1, 2, 3, 0, 1, 2, 3}, {0, 4})));
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->tokens, 8);
  EXPECT_EQ(stats->documents, 2);
  EXPECT_NEAR(stats->unigram_nats, std::log(4), 1e-14);
  EXPECT_NEAR(stats->bigram_nats, 0, 1e-14);
}

TEST(CorpusStats, ConditionalOnThePreviousToken) {
  // After 0 comes 0 or 1, one time each; after 1 always 0: 2/3 of the pairs carry log 2.
  const auto stats = MeasureCorpus(MakeShard({0, 0, 1, 0}));
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_NEAR(stats->bigram_nats, std::log(2) * 2 / 3, 1e-14);
}

TEST(CorpusStats, EqualsTheNaiveSum) {
  std::mt19937 random(5);
  std::vector<uint16_t> tokens(20000);
  for (uint16_t& token : tokens) token = static_cast<uint16_t>((random() % 20) * (random() % 13));
  std::map<int, double> counts;
  std::map<std::pair<int, int>, double> pairs;
  std::map<int, double> previous;
  for (size_t i = 0; i < tokens.size(); ++i) {
    ++counts[tokens[i]];
    if (i == 0) continue;
    ++pairs[{tokens[i - 1], tokens[i]}];
    ++previous[tokens[i - 1]];
  }
  double unigram = 0;
  for (const auto& [token, count] : counts) {
    unigram -= count / tokens.size() * std::log(count / tokens.size());
  }
  double bigram = 0;
  for (const auto& [pair, count] : pairs) {
    bigram -= count / (tokens.size() - 1) * std::log(count / previous[pair.first]);
  }
  const auto stats = MeasureCorpus(MakeShard(tokens));
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_NEAR(stats->unigram_nats, unigram, 1e-11);
  EXPECT_NEAR(stats->bigram_nats, bigram, 1e-11);
  EXPECT_LT(stats->bigram_nats, stats->unigram_nats);
}

TEST(CorpusStats, RefusesTokensAndVocabulariesItCannotCount) {
  const absl::Status outside = MeasureCorpus(MakeShard({0, 9}, /*vocab_size=*/9)).status();
  EXPECT_EQ(outside.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(outside.message()), testing::HasSubstr("token 1 is 9"));
  const absl::Status large = MeasureCorpus(MakeShard({0, 9}, /*vocab_size=*/4097)).status();
  EXPECT_EQ(large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(large.message()), testing::HasSubstr("4097"));
}

}  // namespace
}  // namespace upipe::data
