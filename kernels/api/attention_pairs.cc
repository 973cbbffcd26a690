#include "kernels/api/attention_pairs.h"

#include <algorithm>

namespace upipe::kernels {
namespace {

// Sum of the integers in [begin, end); 0 when empty.
int64_t SumOfRange(int64_t begin, int64_t end) {
  return end <= begin ? 0 : (end - begin) * (begin + end - 1) / 2;
}

// Pairs with q - k <= distance. Query q meets the keys from max(keys.begin, q - distance) on.
int64_t PairsWithin(PositionRun queries, PositionRun keys, int64_t distance) {
  const int64_t full_end = std::clamp(keys.begin + distance + 1, queries.begin, queries.end);
  const int64_t part_end = std::clamp(keys.end + distance, full_end, queries.end);
  const int64_t full = (full_end - queries.begin) * (keys.end - keys.begin);
  const int64_t part =
      (part_end - full_end) * (keys.end + distance) - SumOfRange(full_end, part_end);
  return full + part;
}

PositionRun Intersect(PositionRun a, PositionRun b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

}  // namespace

int64_t VisiblePairs(const AttentionMask& mask, PositionRun queries, PositionRun keys) {
  const std::vector<int64_t>& starts = *mask.document_starts;
  // Largest |q - k| allowed; beyond `total` it changes nothing.
  const int64_t reach = std::min(mask.window.value_or(mask.total + 1), mask.total + 1) - 1;
  const int64_t least = mask.causal ? 0 : -reach;  // smallest q - k allowed
  int64_t pairs = 0;
  auto start = std::upper_bound(starts.begin(), starts.end(), queries.begin);
  if (start != starts.begin()) --start;
  for (; start != starts.end() && *start < queries.end; ++start) {
    const auto next = start + 1;
    const PositionRun document{*start, next == starts.end() ? mask.total : *next};
    const PositionRun q = Intersect(queries, document);
    const PositionRun k = Intersect(keys, document);
    if (q.begin >= q.end || k.begin >= k.end) continue;
    pairs += PairsWithin(q, k, reach) - PairsWithin(q, k, least - 1);
  }
  return pairs;
}

}  // namespace upipe::kernels
