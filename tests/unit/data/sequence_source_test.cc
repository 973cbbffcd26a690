// The order of sequences: a pure function of (seed, index) that visits every window of an epoch
// once, and slices that fit together across ranks.
#include "engine/data/sequence_source.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <vector>

#include "common/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/data/shard_bytes.h"

namespace upipe::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Token i has the value i, so that a token tells its own offset.
TokenShard CountingShard(int num_tokens) {
  std::vector<uint16_t> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return MakeShard(tokens, 65536);
}

SequenceSource MakeSource(int num_tokens, int64_t context, uint64_t seed) {
  auto source = SequenceSource::Create(CountingShard(num_tokens), context, seed);
  UPIPE_CHECK_OK(source.status());
  return *source;
}

std::vector<int64_t> EpochOffsets(const SequenceSource& source, int64_t epoch) {
  std::vector<int64_t> offsets;
  const int64_t count = source.sequences_per_epoch();
  for (int64_t i = epoch * count; i < (epoch + 1) * count; ++i) {
    EXPECT_EQ(source.Window(i).epoch, epoch);
    offsets.push_back(source.Window(i).token_offset);
  }
  return offsets;
}

TEST(SequenceSource, AnEpochVisitsDisjointAdjoiningWindowsOnce) {
  for (const int64_t context : {1, 2, 3, 7, 64, 1000}) {
    for (const int64_t num_tokens : {1001, 1002, 2001, 2002, 2003, 4097, 30000}) {
      const SequenceSource source = MakeSource(static_cast<int>(num_tokens), context, 11);
      const int64_t count = source.sequences_per_epoch();
      EXPECT_GE(count, std::max<int64_t>(1, num_tokens / (context + 1) - 1));
      for (const int64_t epoch : {0, 1, 2, 77}) {
        std::vector<int64_t> offsets = EpochOffsets(source, epoch);
        std::sort(offsets.begin(), offsets.end());
        EXPECT_GE(offsets.front(), 0);
        EXPECT_LE(offsets.back() + context + 1, num_tokens);
        for (size_t i = 1; i < offsets.size(); ++i) {
          ASSERT_EQ(offsets[i], offsets[i - 1] + context + 1)
              << "context " << context << ", " << num_tokens << " tokens, epoch " << epoch;
        }
      }
    }
  }
}

TEST(SequenceSource, SeedAndEpochChangeOrderAndOffset) {
  const SequenceSource source = MakeSource(60000, 100, 1);
  std::set<int64_t> first_offsets;
  std::set<std::vector<int64_t>> orders;
  for (int64_t epoch = 0; epoch < 8; ++epoch) {
    std::vector<int64_t> offsets = EpochOffsets(source, epoch);
    const int64_t first = *std::min_element(offsets.begin(), offsets.end());
    first_offsets.insert(first);
    EXPECT_FALSE(std::is_sorted(offsets.begin(), offsets.end()));
    for (int64_t& offset : offsets) offset -= first;
    orders.insert(offsets);
  }
  EXPECT_GE(first_offsets.size(), 6u);
  EXPECT_EQ(orders.size(), 8u);
  EXPECT_NE(EpochOffsets(source, 0), EpochOffsets(MakeSource(60000, 100, 2), 0));
}

TEST(SequenceSource, EveryTokenIsReachedByTheLastWindowsToo) {
  // 2 x context + 1 tokens: one window a time, whose start must be able to be anywhere.
  const SequenceSource source = MakeSource(21, 10, 3);
  ASSERT_EQ(source.sequences_per_epoch(), 1);
  std::set<int64_t> offsets;
  for (int64_t i = 0; i < 300; ++i) offsets.insert(source.Window(i).token_offset);
  EXPECT_EQ(offsets.size(), 11u);
  EXPECT_EQ(*offsets.begin(), 0);
  EXPECT_EQ(*offsets.rbegin(), 10);
}

TEST(SequenceSource, TheFirstWindowIsUniformOverSeeds) {
  constexpr int kSeeds = 20000;
  std::vector<int> hits(20);
  for (int seed = 0; seed < kSeeds; ++seed) {
    const SequenceSource source = MakeSource(41, 1, seed);
    ASSERT_EQ(source.sequences_per_epoch(), 20);
    ++hits[source.Window(0).token_offset / 2];
  }
  // Offsets 0 and 1 share the first cell, as do all neighbours: 1,000 expected, sigma about 31.
  for (const int count : hits) EXPECT_NEAR(count, kSeeds / 20, 155);
}

TEST(SequenceSource, TheOrderNeverChangesBetweenBuilds) {
  // A job resumed by a newer build must read what the older one would have read: these numbers may
  // only change together with a version in the run plan.
  const SequenceSource source = MakeSource(65000, 127, 42);
  EXPECT_EQ(source.sequences_per_epoch(), 506);
  std::vector<int64_t> offsets;
  for (const int64_t index : {0, 1, 2, 505, 506, 1000000}) {
    offsets.push_back(source.Window(index).token_offset);
  }
  EXPECT_THAT(offsets, testing::ElementsAre(29860, 32292, 18468, 25252, 40769, 17032));
}

TEST(SequenceSource, ReadsTokensAndTheTokensThatFollow) {
  const SequenceSource source = MakeSource(5000, 48, 9);
  EXPECT_EQ(source.context(), 48);
  EXPECT_EQ(source.vocab_size(), 65536u);
  for (const int64_t index : {0, 1, 50, 98, 12345}) {
    const auto offset = static_cast<int32_t>(source.Window(index).token_offset);
    std::vector<int32_t> tokens(48);
    std::vector<int32_t> labels(48);
    ASSERT_EQ(source.Read(index, 0, 48, tokens.data(), labels.data()), absl::OkStatus());
    for (int i = 0; i < 48; ++i) {
      EXPECT_EQ(tokens[i], offset + i);
      EXPECT_EQ(labels[i], offset + i + 1);
    }
  }
}

TEST(SequenceSource, SlicesOfRanksMakeTheWhole) {
  const SequenceSource source = MakeSource(3000, 50, 9);
  std::vector<int32_t> tokens(50);
  std::vector<int32_t> labels(50);
  ASSERT_EQ(source.Read(7, 0, 50, tokens.data(), labels.data()), absl::OkStatus());
  for (const int64_t ranks : {1, 2, 3, 4, 8, 50}) {
    std::vector<int32_t> joined_tokens(50, -1);
    std::vector<int32_t> joined_labels(50, -1);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      // Its own source, as a rank has.
      const SequenceSource own = MakeSource(3000, 50, 9);
      const int64_t begin = 50 * rank / ranks;
      const int64_t count = 50 * (rank + 1) / ranks - begin;
      ASSERT_EQ(own.Read(7, begin, count, &joined_tokens[begin], &joined_labels[begin]),
                absl::OkStatus());
    }
    EXPECT_EQ(joined_tokens, tokens) << ranks << " ranks";
    EXPECT_EQ(joined_labels, labels) << ranks << " ranks";
  }
}

TEST(SequenceSource, WritesOnlyTheRangeAskedFor) {
  const SequenceSource source = MakeSource(100, 10, 0);
  std::vector<int32_t> tokens(10, -7);
  std::vector<int32_t> labels(10, -7);
  ASSERT_EQ(source.Read(0, 4, 3, &tokens[4], &labels[4]), absl::OkStatus());
  for (const int i : {0, 1, 2, 3, 7, 8, 9}) {
    EXPECT_EQ(tokens[i], -7);
    EXPECT_EQ(labels[i], -7);
  }
  EXPECT_EQ(source.Read(0, 10, 0, nullptr, nullptr), absl::OkStatus());
}

TEST(SequenceSource, TheShortestShardHasOneSequence) {
  const SequenceSource source = MakeSource(5, 4, 0);
  EXPECT_EQ(source.sequences_per_epoch(), 1);
  EXPECT_EQ(source.Window(0).token_offset, 0);
  EXPECT_EQ(source.Window(9).token_offset, 0);
  EXPECT_EQ(source.Window(9).epoch, 9);
}

TEST(SequenceSource, TheLargestIndexWorks) {
  const SequenceSource source = MakeSource(5000, 48, 9);
  std::vector<int32_t> tokens(48);
  std::vector<int32_t> labels(48);
  EXPECT_EQ(source.Read(std::numeric_limits<int64_t>::max(), 0, 48, tokens.data(), labels.data()),
            absl::OkStatus());
}

TEST(SequenceSource, RefusesAContextTheShardCannotFill) {
  const auto error = [](int64_t context) {
    const absl::Status status = SequenceSource::Create(CountingShard(5), context, 0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(error(5), AllOf(HasSubstr("made.tokens holds 5 tokens"), HasSubstr("context of 5")));
  EXPECT_THAT(error(std::numeric_limits<int64_t>::max()), HasSubstr("9223372036854775807"));
  EXPECT_THAT(error(0), HasSubstr("context is 0"));
  EXPECT_THAT(error(-3), HasSubstr("context is -3"));
}

TEST(SequenceSource, RefusesRangesOutsideTheContext) {
  const SequenceSource source = MakeSource(100, 10, 0);
  std::vector<int32_t> tokens(20);
  std::vector<int32_t> labels(20);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  const std::vector<std::vector<int64_t>> ranges = {{-1, 0, 1},   {0, -1, 1},  {0, 0, -1},
                                                    {0, 0, 11},   {0, 10, 1},  {0, 11, 0},
                                                    {0, 3, kMax}, {0, kMax, 1}};
  for (const auto& range : ranges) {
    const absl::Status status =
        source.Read(range[0], range[1], range[2], tokens.data(), labels.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument)
        << testing::PrintToString(range) << ": " << status;
  }
}

TEST(SequenceSource, RefusesTokensOutsideTheVocabulary) {
  std::vector<int32_t> tokens(4);
  std::vector<int32_t> labels(4);
  // The last one is a label only.
  for (const int bad : {0, 2, 4}) {
    std::vector<uint16_t> values = {1, 2, 3, 4, 5};
    values[bad] = 257;
    const auto source = SequenceSource::Create(MakeShard(values), 4, 0);
    ASSERT_TRUE(source.ok());
    const absl::Status status = source->Read(0, 0, 4, tokens.data(), labels.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("is 257, the vocabulary has 257"));
  }
}

// Tokens that tell their offsets, documents that begin at `starts`.
absl::StatusOr<SequenceSource> SourceOf(const std::vector<uint64_t>& starts, int num_tokens,
                                        int64_t context,
                                        LabelRule labels = LabelRule::kEveryToken) {
  std::vector<uint16_t> tokens(num_tokens);
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  auto shard = ShardFromBytes(ShardBytes(tokens, starts, 65536));
  UPIPE_CHECK_OK(shard.status());
  return SequenceSource::Create(*std::move(shard), context, 5, labels);
}

TEST(SequenceSourceDocuments, AreThoseOfTheWindowAndBeginAtZero) {
  // Every phase of the window against documents of 1 to 90 tokens, against the definition.
  const std::vector<uint64_t> starts = {0, 1, 2, 40, 41, 130, 199, 200, 260, 300};
  for (const int64_t context : {1, 2, 7, 50, 100}) {
    const auto source = SourceOf(starts, 350, context);
    std::set<int64_t> counts;
    for (int64_t index = 0; index < 400; ++index) {
      const auto offset = static_cast<uint64_t>(source->Window(index).token_offset);
      std::vector<int64_t> expected = {0};
      for (const uint64_t start : starts) {
        if (start > offset && start < offset + context) {
          expected.push_back(static_cast<int64_t>(start - offset));
        }
      }
      const auto documents = source->Documents(index);
      ASSERT_TRUE(documents.ok()) << documents.status();
      ASSERT_EQ(*documents, expected) << "context " << context << ", offset " << offset;
      counts.insert(static_cast<int64_t>(expected.size()));
    }
    EXPECT_GE(counts.size(), context == 1 ? 1u : 2u);
  }
}

TEST(SequenceSourceDocuments, NoLabelCrossesABoundary) {
  const std::vector<uint64_t> starts = {0, 1, 2, 40, 41, 130, 199, 200, 260, 300};
  const std::set<int64_t> first(starts.begin(), starts.end());
  const auto plain = SourceOf(starts, 350, 50);
  const auto cut = SourceOf(starts, 350, 50, LabelRule::kWithinDocuments);
  int64_t at_the_end = 0;
  for (int64_t index = 0; index < 400; ++index) {
    const int64_t offset = cut->Window(index).token_offset;
    // In two slices of any place, as two ranks read them; a boundary may lie between.
    const int64_t split = index % 51;
    std::vector<int32_t> tokens(50), labels(50), plain_tokens(50), plain_labels(50);
    ASSERT_EQ(cut->Read(index, 0, split, tokens.data(), labels.data()), absl::OkStatus());
    ASSERT_EQ(cut->Read(index, split, 50 - split, &tokens.data()[split], &labels.data()[split]),
              absl::OkStatus());
    ASSERT_EQ(plain->Read(index, 0, 50, plain_tokens.data(), plain_labels.data()),
              absl::OkStatus());
    EXPECT_EQ(tokens, plain_tokens);
    for (int64_t i = 0; i < 50; ++i) {
      const bool crosses = first.contains(offset + i + 1);
      ASSERT_EQ(labels[i], crosses ? -1 : plain_labels[i]) << "offset " << offset << " + " << i;
      if (crosses && i == 49) ++at_the_end;
    }
  }
  EXPECT_GT(at_the_end, 0);  // the document that begins right behind the window counts, too
}

TEST(SequenceSourceDocuments, StartsOutOfOrderAreDataLoss) {
  // Each damages one of {0, 10, 20, 30} of a shard of 42 tokens: one window, from 0 or 1.
  for (const std::vector<uint64_t>& starts :
       std::vector<std::vector<uint64_t>>{{0, 20, 10, 30},
                                          {0, 10, 10, 30},
                                          {5, 10, 20, 30},
                                          {0, 10, 20, 42},
                                          {0, 10, ~uint64_t{0}, 30},
                                          {0, 10, 20, uint64_t{1} << 63}}) {
    const auto source = SourceOf(starts, 42, 40, LabelRule::kWithinDocuments);
    ASSERT_TRUE(source.ok());
    const absl::Status documents = source->Documents(0).status();
    EXPECT_EQ(documents.code(), absl::StatusCode::kDataLoss) << testing::PrintToString(starts);
    EXPECT_THAT(std::string(documents.message()), AllOf(HasSubstr("made.tokens: document "),
                                                        HasSubstr("out of order or past its 42")));
    std::vector<int32_t> tokens(40), labels(40);
    EXPECT_EQ(source->Read(0, 0, 40, tokens.data(), labels.data()).code(),
              absl::StatusCode::kDataLoss)
        << testing::PrintToString(starts);
  }
  EXPECT_EQ(MakeSource(100, 10, 0).Documents(-1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// Over every place a window may have, by looking at each.
TEST(SequenceSourceDocuments, TheirBoundsHoldWhereverAWindowLies) {
  const std::vector<std::vector<uint64_t>> shards = {
      {0}, {0, 1}, {0, 199}, {0, 3, 4, 5, 90, 91, 150}, {0, 10, 20, 30, 40, 50, 60, 70, 80, 90}};
  for (const std::vector<uint64_t>& starts : shards) {
    const std::vector<uint16_t> tokens(200, 1);
    const TokenShard shard = *ShardFromBytes(ShardBytes(tokens, starts));
    for (const int64_t context : {1, 2, 7, 30, 64, 199}) {
      int64_t documents_max = 0, tokens_max = 0;
      for (int64_t begin = 0; begin + context <= 200; ++begin) {
        int64_t documents = 1, length = 1;
        for (int64_t at = begin + 1; at < begin + context; ++at) {
          const bool start = std::count(starts.begin(), starts.end(), static_cast<uint64_t>(at));
          documents += start ? 1 : 0;
          length = start ? 1 : length + 1;
          tokens_max = std::max(tokens_max, length);
        }
        tokens_max = std::max<int64_t>(tokens_max, 1);
        documents_max = std::max(documents_max, documents);
      }
      const DocumentBounds bounds = DocumentBoundsOf(shard, context);
      EXPECT_GE(bounds.documents_max, documents_max) << starts.size() << ", " << context;
      EXPECT_LE(bounds.documents_max, documents_max + 1) << starts.size() << ", " << context;
      EXPECT_EQ(bounds.tokens_max, tokens_max) << starts.size() << ", " << context;
    }
  }
}

TEST(RotaryPositions, RestartInEveryDocument) {
  const std::vector<int64_t> documents = {0, 3, 4, 9};
  const std::vector<int64_t> all = {0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1, 2};
  for (int64_t begin = 0; begin <= 12; ++begin) {
    for (int64_t end = begin; end <= 12; ++end) {
      std::vector<int64_t> positions(end - begin, -1);
      RotaryPositions(documents, {.begin = begin, .end = end}, positions.data());
      EXPECT_EQ(positions, std::vector<int64_t>(all.begin() + begin, all.begin() + end));
    }
  }
}

}  // namespace
}  // namespace upipe::data
