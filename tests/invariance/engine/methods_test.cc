// Every method against one rank: method x (C, R) x u x (H, K) x context x mask x documents x memory
// policy x overlap x storage type x data axes, every pair of them, held to the bound.
#include <gtest/gtest.h>

#include <ostream>
#include <set>
#include <utility>

#include "tests/invariance/engine/method_space.h"
#include "tests/invariance/engine/pairwise.h"

namespace upipe::testing {

namespace {

class Methods : public ::testing::TestWithParam<NamedCase> {};

TEST_P(Methods, LossAndEveryGradientAreThoseOfOneRank) { ExpectMatchesOneRank(GetParam().test); }

INSTANTIATE_TEST_SUITE_P(EveryPair, Methods, ::testing::ValuesIn(PairwiseCases()),
                         [](const auto& info) { return info.param.name; });

TEST(EveryPair, StandsInSomeRowUnlessTheRulesForbidIt) {
  const std::vector<int> sizes = {3, 5, 2, 4};
  const auto legal = [](const Row& row) { return row[0] != 1 || row[3] != 2; };
  const std::vector<Row> rows = EveryPair(sizes, legal);
  EXPECT_LT(rows.size(), 30u);  // of 120; 20 at least
  for (size_t i = 0; i < sizes.size(); ++i) {
    for (size_t j = i + 1; j < sizes.size(); ++j) {
      std::set<std::pair<int, int>> seen;
      for (const Row& row : rows) seen.insert({row[i], row[j]});
      const size_t forbidden = i == 0 && j == 3 ? 1 : 0;
      EXPECT_EQ(seen.size(), sizes[i] * sizes[j] - forbidden) << i << ", " << j;
    }
  }
}

}  // namespace
}  // namespace upipe::testing
