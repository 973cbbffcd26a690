// The bytes of shards and records: what is written is read back, and no byte that is changed, cut
// or made up is taken for a checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/sha256.h"
#include "engine/checkpoint/content.h"
#include "engine/checkpoint/record.h"
#include "engine/checkpoint/shard_file.h"
#include "tests/support/engine/checkpoint_files.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::checkpoint {
namespace {

using ::testing::HasSubstr;
using upipe::testing::TestFacts;
using upipe::testing::TestState;
using upipe::testing::TestTensors;

class ShardTest : public ::testing::Test {
 protected:
  v1::ShardSummary Write(int rank, const std::vector<MemoryPiece>& pieces) {
    auto summary = WriteShard(folder_, ShardName(rank), pieces, [] { return absl::OkStatus(); });
    EXPECT_TRUE(summary.ok()) << summary.status();
    summary->set_rank(rank);
    return *summary;
  }
  absl::StatusOr<Content> ContentOf(const std::vector<v1::ShardSummary>& summaries) {
    std::vector<ShardFile> shards;
    for (const v1::ShardSummary& summary : summaries) {
      auto shard = ShardFile::Open(folder_, summary);
      if (!shard.ok()) return shard.status();
      shards.push_back(*std::move(shard));
    }
    return Content::Create(TestFacts().tensors(), std::move(shards));
  }

  data::TempFolder temp_;
  Folder folder_ = *Folder::OpenRoot(temp_.Path("shards"), /*make=*/true);
};

TEST_F(ShardTest, TheSumDoesNotDependOnTheCut) {
  const TestTensors tensors(1);
  std::string expected;
  for (const int ranks : {1, 2, 3, 7, 16}) {
    std::vector<v1::ShardSummary> summaries;
    for (int rank = 0; rank < ranks; ++rank) {
      summaries.push_back(Write(rank, tensors.Pieces(rank, ranks)));
    }
    const auto content = ContentOf(summaries);
    ASSERT_TRUE(content.ok()) << content.status();
    EXPECT_TRUE(content->Verify().ok());
    const auto sum = content->Sum(TestState(3));
    ASSERT_TRUE(sum.ok()) << sum.status();
    if (expected.empty()) expected = *sum;
    EXPECT_EQ(*sum, expected) << ranks << " ranks";
    for (const int64_t offset : {int64_t{0}, int64_t{16380}, int64_t{39990}}) {
      std::vector<float> values(10);
      ASSERT_TRUE(content->Read("b", v1::VALUE_KIND_WEIGHT, offset, 10, values.data()).ok());
      EXPECT_EQ(std::memcmp(values.data(),
                            tensors.values("b", v1::VALUE_KIND_WEIGHT).data() + offset, 40),
                0);
    }
    EXPECT_NE(*content->Sum(TestState(4)), expected);
  }
}

TEST_F(ShardTest, TheSumIsOfEveryValueAndKind) {
  const TestTensors tensors(1);
  const std::string before = *ContentOf({Write(0, tensors.Pieces(0, 1))})->Sum(TestState(3));
  std::vector<MemoryPiece> pieces = tensors.Pieces(0, 1);
  for (MemoryPiece& piece : pieces) {
    SCOPED_TRACE(absl::StrCat(piece.tensor, " ", piece.kind));
    const float* data = piece.data;
    std::vector<float> changed(data, data + piece.count);
    changed.back() += 1;
    piece.data = changed.data();
    EXPECT_NE(*ContentOf({Write(0, pieces)})->Sum(TestState(3)), before);
    piece.data = data;
  }
  std::swap(pieces[0].kind, pieces[1].kind);
  EXPECT_NE(*ContentOf({Write(0, pieces)})->Sum(TestState(3)), before);
}

TEST_F(ShardTest, HolesOverlapsAndStrangersAreNamed) {
  const TestTensors tensors(1);
  const auto refusal = [&](const std::function<void(std::vector<MemoryPiece>&)>& spoil) {
    std::vector<MemoryPiece> pieces = tensors.Pieces(0, 1);
    spoil(pieces);
    return std::string(ContentOf({Write(0, pieces)}).status().message());
  };
  EXPECT_EQ(refusal([](auto&) {}), "");
  EXPECT_THAT(refusal([](auto& pieces) { pieces.pop_back(); }), HasSubstr("second moments of c"));
  EXPECT_THAT(refusal([](auto& pieces) { pieces.push_back(pieces[0]); }),
              HasSubstr("weights of a, 15 elements, exactly once"));
  EXPECT_THAT(refusal([](auto& pieces) { --pieces[3].count; }),
              HasSubstr("weights of b, 40000 elements, exactly once: wrong from element 39999"));
  EXPECT_THAT(refusal([](auto& pieces) { pieces[3].offset = 1; }), HasSubstr("weights of b"));
  EXPECT_THAT(refusal([](auto& pieces) { pieces[0].tensor = "x"; }),
              HasSubstr("weights of x, which is no tensor"));
}

// Every byte of the header, the index and its sums is looked at, and so is every value.
TEST_F(ShardTest, NoByteCanChangeUnnoticed) {
  std::vector<float> values(300, 1.5f);
  const std::vector<MemoryPiece> pieces = {
      {.tensor = "t", .kind = v1::VALUE_KIND_WEIGHT, .count = 300, .data = values.data()}};
  const v1::ShardSummary summary = Write(0, pieces);
  const std::string good = temp_.Read("shards/rank-0.shard");
  const auto read = [&](const std::string& bytes) {
    temp_.Write("shards/rank-0.shard", bytes);
    const auto shard = ShardFile::Open(folder_, summary);
    return shard.ok() ? shard->Verify() : shard.status();
  };
  ASSERT_TRUE(read(good).ok());
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 0x20;
    EXPECT_FALSE(read(bad).ok()) << "byte " << at << " of " << good.size();
    EXPECT_FALSE(read(good.substr(0, at)).ok()) << "cut at " << at;
  }
  EXPECT_FALSE(read(good + '\0').ok());
}

// Headers and indices whose sums are right and whose numbers are not.
TEST_F(ShardTest, NumbersThatCannotBeAreRefused) {
  const auto parse = [](const std::function<void(v1::ShardPiece&)>& spoil) {
    v1::ShardIndex index;
    v1::ShardPiece& piece = *index.add_pieces();
    piece.set_tensor("t");
    piece.set_kind(v1::VALUE_KIND_WEIGHT);
    piece.set_count(16);
    piece.set_file_offset(64);
    piece.set_block_sums(std::string(kSumBytes, 'x'));
    spoil(piece);
    const std::string bytes = index.SerializeAsString();
    const auto size = static_cast<int64_t>(128 + bytes.size());
    const auto header = ParseShardHeader(EncodeShardHeader(bytes, 128), size, "file");
    EXPECT_TRUE(header.ok()) << header.status();
    return ParseShardIndex(bytes, *header, "file").status();
  };
  EXPECT_TRUE(parse([](v1::ShardPiece&) {}).ok());
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const std::vector<std::function<void(v1::ShardPiece&)>> spoils = {
      [](v1::ShardPiece& p) { p.set_tensor(""); },
      [](v1::ShardPiece& p) { p.set_kind(v1::VALUE_KIND_UNSPECIFIED); },
      [](v1::ShardPiece& p) { p.set_kind(static_cast<v1::ValueKind>(9)); },
      [](v1::ShardPiece& p) { p.set_count(0); },
      [](v1::ShardPiece& p) { p.set_count(-16); },
      [](v1::ShardPiece& p) { p.set_count(17); },
      [](v1::ShardPiece& p) { p.set_count(kHuge); },
      [](v1::ShardPiece& p) { p.set_count(kHuge / 4 + 1); },
      [](v1::ShardPiece& p) { p.set_offset(-1); },
      [](v1::ShardPiece& p) { p.set_offset(kHuge); },
      [](v1::ShardPiece& p) { p.set_offset(kBlockElements - 1); },  // two blocks, one sum
      [](v1::ShardPiece& p) { p.set_file_offset(0); },
      [](v1::ShardPiece& p) { p.set_file_offset(65); },
      [](v1::ShardPiece& p) { p.set_file_offset(128); },
      [](v1::ShardPiece& p) { p.set_file_offset(-64); },
      [](v1::ShardPiece& p) { p.set_file_offset(kHuge - 63); },
      [](v1::ShardPiece& p) { p.mutable_block_sums()->pop_back(); },
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    EXPECT_EQ(parse(spoils[i]).code(), absl::StatusCode::kDataLoss) << "spoil " << i;
  }
  std::string header = EncodeShardHeader("index", 64);
  header[8] = 2;
  EXPECT_THAT(std::string(ParseShardHeader(header, 69, "file").status().message()),
              HasSubstr("version 2"));
}

v1::CheckpointManifest SomeManifest() {
  v1::CheckpointManifest manifest = TestFacts();
  manifest.set_version(kManifestVersion);
  *manifest.mutable_state() = TestState(5);
  for (int rank = 0; rank < 2; ++rank) {
    v1::ShardSummary& shard = *manifest.add_shards();
    shard.set_rank(rank);
    shard.set_index_sha256(std::string(kSumBytes, 'x'));
  }
  return manifest;
}

TEST(Record, NoByteOfAManifestCanChangeUnnoticed) {
  const std::string good = EncodeRecord(SomeManifest());
  const auto read = DecodeManifest(good, "MANIFEST");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->SerializeAsString(), SomeManifest().SerializeAsString());
  EXPECT_EQ(Sha256OfRecord(good).size(), 64u);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 0x01;
    EXPECT_FALSE(DecodeManifest(bad, "MANIFEST").ok()) << "byte " << at;
    EXPECT_FALSE(DecodeManifest(good.substr(0, at), "MANIFEST").ok()) << "cut at " << at;
  }
  EXPECT_FALSE(DecodeManifest(good + 'x', "MANIFEST").ok());
  EXPECT_FALSE(DecodeOwner(good, "OWNER").ok());
  EXPECT_FALSE(DecodeSummary(good, "rank-0.summary").ok());
}

TEST(Record, ManifestsThatCannotBeAreRefused) {
  const std::vector<std::function<void(v1::CheckpointManifest&)>> spoils = {
      [](v1::CheckpointManifest& m) { m.set_version(kManifestVersion + 1); },
      [](v1::CheckpointManifest& m) { m.mutable_state()->set_step(0); },
      [](v1::CheckpointManifest& m) { m.clear_shards(); },
      [](v1::CheckpointManifest& m) { m.mutable_shards(1)->set_rank(0); },
      [](v1::CheckpointManifest& m) { m.mutable_shards(1)->set_index_sha256("short"); },
      [](v1::CheckpointManifest& m) { m.mutable_tensors(1)->set_name("b"); },
      [](v1::CheckpointManifest& m) { m.mutable_tensors(1)->set_name(""); },
      [](v1::CheckpointManifest& m) { m.mutable_tensors(1)->clear_shape(); },
      [](v1::CheckpointManifest& m) { m.mutable_tensors(1)->set_shape(0, -3); },
      [](v1::CheckpointManifest& m) { m.mutable_tensors(1)->set_shape(0, int64_t{1} << 62); },
  };
  for (size_t i = 0; i < spoils.size(); ++i) {
    v1::CheckpointManifest manifest = SomeManifest();
    spoils[i](manifest);
    EXPECT_FALSE(DecodeManifest(EncodeRecord(manifest), "MANIFEST").ok()) << "spoil " << i;
  }
}

}  // namespace
}  // namespace upipe::checkpoint
