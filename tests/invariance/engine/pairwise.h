// Rows of choices in which every two values of two dimensions stand together at least once, as far
// as the rules allow: a space of thousands of millions of points in some hundreds. Deterministic.
#pragma once

#include <functional>
#include <vector>

namespace upipe::testing {

// One value's index per dimension.
using Row = std::vector<int>;

// `sizes` has the number of values of each dimension. A pair for which some hundred tries find no
// legal row is left out.
std::vector<Row> EveryPair(const std::vector<int>& sizes,
                           const std::function<bool(const Row&)>& legal);

}  // namespace upipe::testing
