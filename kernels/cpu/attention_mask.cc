#include "kernels/cpu/attention_mask.h"

#include <algorithm>
#include <vector>

namespace upipe::kernels::cpu {
namespace {

PositionRun DocumentOf(const AttentionMask& mask, int64_t position) {
  const std::vector<int64_t>& starts = *mask.document_starts;
  const auto next = std::upper_bound(starts.begin(), starts.end(), position);
  return {*(next - 1), next == starts.end() ? mask.total : *next};
}

// A window wider than all positions hides nothing.
int64_t Window(const AttentionMask& mask) { return std::min(*mask.window, mask.total); }

}  // namespace

PositionRun VisibleKeys(const AttentionMask& mask, int64_t query) {
  PositionRun keys = DocumentOf(mask, query);
  if (mask.window) keys.begin = std::max(keys.begin, query - Window(mask) + 1);
  if (mask.causal) {
    keys.end = query + 1;
  } else if (mask.window) {
    keys.end = std::min(keys.end, query + Window(mask));
  }
  return keys;
}

PositionRun VisibleQueries(const AttentionMask& mask, int64_t key) {
  PositionRun queries = DocumentOf(mask, key);
  if (mask.window) queries.end = std::min(queries.end, key + Window(mask));
  if (mask.causal) {
    queries.begin = key;
  } else if (mask.window) {
    queries.begin = std::max(queries.begin, key - Window(mask) + 1);
  }
  return queries;
}

PositionRun KeysSeen(const AttentionMask& mask, PositionRun queries, PositionRun keys) {
  if (queries.begin >= queries.end) return {keys.begin, keys.begin};
  return Intersection(
      {VisibleKeys(mask, queries.begin).begin, VisibleKeys(mask, queries.end - 1).end}, keys);
}

PositionRun QueriesSeeing(const AttentionMask& mask, PositionRun keys, PositionRun queries) {
  if (keys.begin >= keys.end) return {queries.begin, queries.begin};
  return Intersection(
      {VisibleQueries(mask, keys.begin).begin, VisibleQueries(mask, keys.end - 1).end}, queries);
}

PositionRun Intersection(PositionRun a, PositionRun b) {
  const int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

bool SeesAll(const AttentionMask& mask, PositionRun queries, PositionRun keys) {
  return VisibleKeys(mask, queries.begin).end >= keys.end &&
         VisibleKeys(mask, queries.end - 1).begin <= keys.begin;
}

}  // namespace upipe::kernels::cpu
