// The kept shards of the fuzzer's corpus, by what the reader must make of them.
#include "tests/fuzz/data/fuzz_shard_header.h"

#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "common/check.h"
#include "gtest/gtest.h"

namespace upipe::data {
namespace {

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

}  // namespace
}  // namespace upipe::data
