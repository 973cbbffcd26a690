// The shard format: what the writer writes is what the description says, and the reader refuses
// everything else with the numbers that are wrong.
#include "engine/data/token_shard.h"

#include <sys/stat.h>

#include "engine/data/shard_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/data/shard_bytes.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::data {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(ShardWriter, WritesTheDescribedBytes) {
  TempFolder folder;
  const std::string path = folder.Path("a.tokens");
  ASSERT_TRUE(WriteByteShard(path, {"ab", "", "\xff"}).ok());
  EXPECT_EQ(folder.Read("a.tokens"), ShardBytes({256, 'a', 'b', 256, 256, 255}, {0, 3, 4}));
}

TEST(ShardWriter, AnyLengthReadsBack) {
  // Around the writer's chunk of 2^17 tokens and the padding to 8 bytes.
  for (const size_t length : {1u, 2u, 3u, 4u, 131070u, 131071u, 131072u, 262143u, 300001u}) {
    TempFolder folder;
    std::string text(length, ' ');
    for (size_t i = 0; i < length; ++i) text[i] = static_cast<char>(i * 7 + i / 256);
    ASSERT_TRUE(WriteByteShard(folder.Path("a.tokens"), {text, "z"}).ok());
    const auto shard = TokenShard::Open(folder.Path("a.tokens"));
    ASSERT_TRUE(shard.ok()) << shard.status();
    EXPECT_EQ(shard->Verify(), absl::OkStatus());
    ASSERT_EQ(shard->num_tokens(), static_cast<int64_t>(length) + 3);
    EXPECT_THAT(shard->document_starts(), ElementsAre(0, length + 1));
    for (size_t i = 0; i < length; ++i) {
      ASSERT_EQ(shard->tokens()[i + 1], static_cast<uint8_t>(text[i])) << "token " << i + 1;
    }
    EXPECT_EQ(shard->tokens()[length + 1], 256);
    EXPECT_EQ(shard->tokens()[length + 2], 'z');
  }
}

TEST(ShardWriter, LeavesAnExistingFileAlone) {
  TempFolder folder;
  const std::string path = folder.Write("a.tokens", "precious");
  const absl::Status status = WriteByteShard(path, {"ab"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  EXPECT_EQ(folder.Read("a.tokens"), "precious");
}

TEST(ShardWriter, AWriteThatFailsLeavesNothing) {
  TempFolder folder;
  const FileSizeLimit limit(1000);
  const absl::Status status =
      WriteByteShard(folder.Path("a.tokens"), {std::string(5000, 'x')}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr(folder.Path("a.tokens")));
  EXPECT_EQ(folder.CountEntries(), 0);
}

TEST(TokenShard, OpensWhatItDescribes) {
  TempFolder folder;
  const std::string path =
      folder.Write("a.tokens", ShardBytes({256, 1, 2, 256, 3}, {0, 3}, /*vocab_size=*/300));
  const auto shard = TokenShard::Open(path);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(shard->Verify(), absl::OkStatus());
  EXPECT_EQ(shard->path(), path);
  EXPECT_EQ(shard->vocab_size(), 300u);
  EXPECT_EQ(shard->num_tokens(), 5);
  EXPECT_EQ(shard->num_documents(), 2);
  EXPECT_THAT(shard->tokens(), ElementsAre(256, 1, 2, 256, 3));
  EXPECT_THAT(shard->document_starts(), ElementsAre(0, 3));
}

TEST(TokenShard, CopiesOutliveTheOriginal) {
  TempFolder folder;
  const std::string path = folder.Write("a.tokens", ShardBytes({256, 1}, {0}));
  auto first = TokenShard::Open(path);
  ASSERT_TRUE(first.ok());
  const TokenShard copy = *first;
  first = absl::CancelledError("gone");
  std::filesystem::remove(path);
  EXPECT_THAT(copy.tokens(), ElementsAre(256, 1));
}

TEST(TokenShard, RefusesWhatIsNoShard) {
  TempFolder folder;
  const auto error = [](const std::string& path) {
    const absl::Status status = TokenShard::Open(path).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    return status;
  };
  EXPECT_EQ(error(folder.Path("missing")).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(error(folder.Path("")).ToString(), HasSubstr("no regular file"));
  EXPECT_THAT(error(folder.Write("empty", "")).ToString(), HasSubstr("0 bytes"));
  EXPECT_THAT(error(folder.Write("short", std::string(63, 'U'))).ToString(), HasSubstr("63 bytes"));
  const absl::Status text = error(folder.Write("text", std::string(999, 'U')));
  EXPECT_EQ(text.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(text.ToString(), HasSubstr("UPTOKENS"));
  ASSERT_EQ(mkfifo(folder.Path("fifo").c_str(), 0600), 0);
  EXPECT_THAT(error(folder.Path("fifo")).ToString(), HasSubstr("no regular file"));
}

// A header field changed, the checksums made right again.
struct FieldCase {
  const char* name;
  size_t offset;
  uint64_t value;
  int num_bytes;
  absl::StatusCode code;
  const char* message;
};

class ShardHeaderField : public testing::TestWithParam<FieldCase> {};

TEST_P(ShardHeaderField, IsChecked) {
  const FieldCase& field = GetParam();
  std::string bytes = ShardBytes({256, 1, 2, 256, 3}, {0, 3});
  PutLittleEndian(bytes, field.offset, field.value, field.num_bytes);
  SealShard(bytes);
  const absl::Status status = ShardFromBytes(bytes).status();
  EXPECT_EQ(status.code(), field.code) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("made.tokens"), HasSubstr(field.message)));
}

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
constexpr auto kLoss = absl::StatusCode::kDataLoss;

INSTANTIATE_TEST_SUITE_P(
    Fields, ShardHeaderField,
    testing::Values(
        FieldCase{"magic", 0, 'u', 1, kInvalid, "UPTOKENS"},
        FieldCase{"version", 8, 2, 4, kInvalid, "version 2, this build reads version 1"},
        FieldCase{"vocab_none", 12, 0, 4, kInvalid, "vocabulary of 0 tokens"},
        FieldCase{"vocab_large", 12, 65537, 4, kInvalid, "vocabulary of 65537 tokens"},
        FieldCase{"token_bytes", 16, 4, 4, kInvalid, "tokens of 4 bytes, this build reads 2"},
        FieldCase{"reserved", 20, 9, 4, kLoss, "9 and 0, expected 0"},
        FieldCase{"no_tokens", 24, 0, 8, kLoss, "claims 0 tokens"},
        FieldCase{"more_tokens", 24, 9, 8, kLoss,
                  "has 96 bytes, its header (9 tokens, 2 documents)"},
        FieldCase{"tokens_overflow", 24, (uint64_t{1} << 63) + 5, 8, kLoss,
                  "claims 9223372036854775813 tokens"},
        FieldCase{"no_documents", 32, 0, 8, kLoss, "claims 0 documents"},
        FieldCase{"more_documents", 32, 6, 8, kLoss, "claims 6 documents in 5 tokens"},
        FieldCase{"fewer_documents", 32, 1, 8, kLoss, "has 96 bytes"},
        FieldCase{"reserved2", 56, 7, 8, kLoss, "0 and 7, expected 0"}),
    [](const auto& info) { return info.param.name; });

TEST(TokenShard, RefusesAnyLengthButItsOwn) {
  const std::string bytes = ShardBytes({256, 1, 2, 256, 3}, {0, 3});
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ShardFromBytes(bytes.substr(0, length)).ok()) << length << " bytes";
  }
  EXPECT_FALSE(ShardFromBytes(bytes + '\0').ok());
  EXPECT_TRUE(ShardFromBytes(bytes).ok());
}

TEST(TokenShard, NoticesEveryFlippedBit) {
  const std::string bytes = ShardBytes({256, 1, 2, 256, 3}, {0, 3});
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    std::string flipped = bytes;
    flipped[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    const auto shard = ShardFromBytes(flipped);
    // The last header field is checked by its value, the rest by checksums.
    EXPECT_FALSE(shard.ok() && shard->Verify().ok()) << "bit " << bit;
  }
}

TEST(TokenShard, VerifyNamesTheDamage) {
  const auto verify = [](const std::string& bytes) {
    const auto shard = ShardFromBytes(bytes);
    EXPECT_TRUE(shard.ok()) << shard.status();
    const absl::Status status = shard->Verify();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    return std::string(status.message());
  };
  std::string damaged = ShardBytes({256, 1, 2, 256, 3}, {0, 3});
  damaged[66] ^= 1;
  EXPECT_THAT(verify(damaged), HasSubstr("xxHash64 of its payload"));
  EXPECT_THAT(verify(ShardBytes({256, 1, 257}, {0})),
              HasSubstr("token 2 is 257, the vocabulary has 257"));
  EXPECT_THAT(verify(ShardBytes({256, 1, 2}, {1})), HasSubstr("document 0 starts at token 1"));
  EXPECT_THAT(verify(ShardBytes({256, 1, 2}, {0, 0})), HasSubstr("document 1 starts at token 0"));
  EXPECT_THAT(verify(ShardBytes({256, 1, 2}, {0, 3})), HasSubstr("document 1 starts at token 3"));
}

}  // namespace
}  // namespace upipe::data
