// Drives FuzzShardHeader over the kept corpus and a fixed number of seeded mutations of it. Half of
// the mutants have their checksums made right again, or none would come past the header's.
#include "tests/fuzz/data/fuzz_shard_header.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "common/check.h"
#include "gtest/gtest.h"
#include "tests/unit/data/shard_bytes.h"

namespace upipe::data {
namespace {

constexpr int kMutants = 60000;

ShardVerdict Fuzz(const std::string& bytes) {
  return FuzzShardHeader(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
}

// Files of the corpus by name.
std::map<std::string, std::string> Corpus() {
  const char* source = getenv("UPIPE_SOURCE_DIR");
  UPIPE_CHECK(source != nullptr) << "UPIPE_SOURCE_DIR is set by ctest";
  std::map<std::string, std::string> corpus;
  const std::string folder = std::string(source) + "/tests/fuzz/data/corpus";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ostringstream content;
    content << std::ifstream(entry.path(), std::ios::binary).rdbuf();
    corpus[entry.path().filename()] = content.str();
  }
  return corpus;
}

// One to three edits: a flipped bit, an interesting number over a header field or the payload, a
// cut, an insertion. Most keep the length, which the header fixes.
std::string Mutate(std::string bytes, std::mt19937_64& random) {
  constexpr uint64_t kNumbers[] = {0,
                                   1,
                                   2,
                                   7,
                                   255,
                                   257,
                                   0xffff,
                                   0x10000,
                                   0x7fffffff,
                                   1u << 31,
                                   0xffffffff,
                                   uint64_t{1} << 56,
                                   ~uint64_t{0} / 2,
                                   ~uint64_t{0} - 7,
                                   ~uint64_t{0}};
  for (uint64_t edits = 1 + random() % 3; edits > 0 && !bytes.empty(); --edits) {
    const size_t at = random() % bytes.size();
    const uint64_t number = kNumbers[random() % std::size(kNumbers)];
    switch (random() % 8) {
      case 0:
      case 1:
      case 2:
        bytes[at] ^= static_cast<char>(1 << random() % 8);
        break;
      case 3:
        if (bytes.size() >= 64) PutLittleEndian(bytes, random() % 15 * 4, number, 4);
        break;
      case 4:
        if (bytes.size() >= 64) PutLittleEndian(bytes, random() % 8 * 8, number, 8);
        break;
      case 5:
        if (bytes.size() > 66) {
          PutLittleEndian(bytes, 64 + random() % (bytes.size() - 65), number, 2);
        }
        break;
      case 6:
        bytes.erase(at, 1 + random() % 16);
        break;
      case 7:
        bytes.insert(at, 1 + random() % 16, static_cast<char>(random()));
        break;
    }
  }
  if (bytes.size() >= 64 && random() % 2 == 0) SealShard(bytes);
  return bytes;
}

TEST(FuzzShardHeader, KeptCorpus) {
  const auto corpus = Corpus();
  ASSERT_GE(corpus.size(), 6u);
  for (const auto& [name, bytes] : corpus) {
    // The names say what the reader must make of them: valid_, opened_ (damaged payload), refused_.
    const ShardVerdict expected = name.starts_with("valid_")    ? ShardVerdict::kVerified
                                  : name.starts_with("opened_") ? ShardVerdict::kOpened
                                                                : ShardVerdict::kRefused;
    EXPECT_EQ(Fuzz(bytes), expected) << name;
  }
}

TEST(FuzzShardHeader, SeededMutants) {
  const auto corpus = Corpus();
  std::map<ShardVerdict, int> verdicts;
  for (int i = 0; i < kMutants; ++i) {
    std::mt19937_64 random(i);
    auto file = corpus.begin();
    std::advance(file, random() % corpus.size());
    ++verdicts[Fuzz(Mutate(file->second, random))];
  }
  // Mutants that never came past the header would test the checksum only.
  EXPECT_GT(verdicts[ShardVerdict::kRefused], kMutants / 10);
  EXPECT_GT(verdicts[ShardVerdict::kOpened], kMutants / 50);
  EXPECT_GT(verdicts[ShardVerdict::kVerified], kMutants / 100);
}

}  // namespace
}  // namespace upipe::data
