#include "common/ids.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace upipe {
namespace {

TEST(Ids, NoncesAre128BitHexAndDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    const std::string nonce = RandomNonce();
    EXPECT_THAT(nonce, testing::MatchesRegex("[0-9a-f]{32}"));
    EXPECT_TRUE(seen.insert(nonce).second);
  }
}

TEST(Ids, JobIdsAreTheNameAndSixCharacters) {
  std::set<char> used;
  for (int i = 0; i < 1000; ++i) {
    const std::string id = NewJobId("demo");
    EXPECT_THAT(id, testing::MatchesRegex("demo-[a-z2-7]{6}"));
    used.insert(id.begin() + 5, id.end());
  }
  EXPECT_EQ(used.size(), 32u);
}

}  // namespace
}  // namespace upipe
