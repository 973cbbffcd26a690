// How calls of attention are cut into launches, and what their rows see.
#include "kernels/cuda/attention_launch.h"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/cuda/attention_mask.cuh"

namespace upipe::kernels::cuda {
namespace {

constexpr int64_t kFar = int64_t{1} << 33;

struct Case {
  PositionRun queries, keys;
  bool causal = true;
  std::optional<int64_t> window;
  std::vector<int64_t> starts = {0};
  int64_t total = kFar * 2;
};

AttentionMask MaskOf(const Case& c) {
  return {c.causal, c.window, std::make_shared<const std::vector<int64_t>>(c.starts), c.total};
}

// `count` documents, those of index i (1 + i % longest) positions long.
std::vector<int64_t> Starts(int count, int64_t longest, int64_t from = 0) {
  std::vector<int64_t> starts = {0};
  for (int64_t i = 0, at = from; i < count; ++i, at += 1 + i % longest) {
    if (at > 0) starts.push_back(at);
  }
  return starts;
}

bool Visible(const Case& c, int64_t query, int64_t key) {
  const auto document = [&](int64_t position) {
    return std::upper_bound(c.starts.begin(), c.starts.end(), position) - c.starts.begin();
  };
  return !(c.causal && key > query) && !(c.window && std::abs(query - key) >= *c.window) &&
         document(query) == document(key);
}

// Every row is in one launch, in ascending order, and sees the columns it should.
void ExpectLaunches(const Case& c, bool over_keys, int64_t launches) {
  const PositionRun rows = over_keys ? c.keys : c.queries, columns = over_keys ? c.queries : c.keys;
  int64_t next = 0, count = 0;
  const auto check = [&](const LaunchRows& launch) {
    ++count;
    EXPECT_EQ(launch.first_row, next);
    EXPECT_EQ(launch.first_row % kAttentionTileRows, 0);
    EXPECT_GT(launch.end_row, launch.first_row);
    EXPECT_LE(launch.num_documents, kLaunchDocuments);
    next = launch.end_row;
    for (int64_t row = launch.first_row; row < launch.end_row; ++row) {
      const Span seen = ColumnsSeen(launch, row);
      ASSERT_TRUE(0 <= seen.begin && seen.begin <= seen.end &&
                  seen.end <= columns.end - columns.begin);
      for (int64_t column = columns.begin; column < columns.end; ++column) {
        const int64_t i = column - columns.begin, position = rows.begin + row;
        const bool visible =
            over_keys ? Visible(c, column, position) : Visible(c, position, column);
        ASSERT_EQ(i >= seen.begin && i < seen.end, visible) << row << " sees " << i;
      }
    }
  };
  if (over_keys) {
    ForEachKeyLaunch(MaskOf(c), c.keys, c.queries, check);
  } else {
    ForEachQueryLaunch(MaskOf(c), c.queries, c.keys, check);
  }
  EXPECT_EQ(next, rows.end - rows.begin);
  EXPECT_EQ(count, launches);
}

TEST(AttentionLaunch, RowsSeeWhatTheMaskSays) {
  std::vector<Case> cases = {{{100, 300}, {50, 350}}, {{0, 200}, {200, 250}},
                             {{300, 301}, {0, 300}},  {{0, 0}, {0, 10}},
                             {{0, 130}, {5, 5}},      {{kFar, kFar + 150}, {kFar - 90, kFar + 70}}};
  for (const Case& runs : cases) {
    for (const bool causal : {true, false}) {
      for (const std::optional<int64_t> window :
           {std::optional<int64_t>(), std::optional<int64_t>(1), std::optional<int64_t>(37),
            std::optional<int64_t>(INT64_MAX)}) {
        for (const auto& starts :
             {Starts(0, 1), Starts(9, 40, 95), Starts(300, 1, kFar - 70), Starts(100, 5, 60)}) {
          const Case c = {runs.queries, runs.keys, causal, window, starts};
          ExpectLaunches(c, false, c.queries.end > c.queries.begin ? 1 : 0);
          ExpectLaunches(c, true, c.keys.end > c.keys.begin ? 1 : 0);
        }
      }
    }
  }
}

// Documents of one token: 320 fit one launch, of which two tiles are whole.
TEST(AttentionLaunch, ManyDocumentsTakeSeveralLaunches) {
  const Case c = {{0, 1000}, {100, 200}, true, std::nullopt, Starts(1000, 1), 1000};
  ExpectLaunches(c, false, 4);
  const Case keys = {{100, 200}, {0, 1000}, true, std::nullopt, Starts(1000, 1), 1000};
  ExpectLaunches(keys, true, 4);
  const Case most = {{0, kLaunchDocuments},       {0, 10},         true, std::nullopt,
                     Starts(kLaunchDocuments, 1), kLaunchDocuments};
  ExpectLaunches(most, false, 1);
}

TEST(AttentionLaunch, HeadsAreCutInOrder) {
  std::vector<int32_t> kv_slot(150), seen;
  for (int i = 0; i < 150; ++i) kv_slot[i] = 1000 - i;
  int launches = 0;
  ForEachHeadLaunch(kv_slot, [&](const LaunchHeads& heads) {
    ++launches;
    EXPECT_EQ(heads.first_head, static_cast<int32_t>(seen.size()));
    seen.insert(seen.end(), heads.kv_slot, heads.kv_slot + heads.num_heads);
  });
  EXPECT_EQ(launches, 3);
  EXPECT_EQ(seen, kv_slot);
  ForEachHeadLaunch({}, [](const LaunchHeads&) { ADD_FAILURE() << "no heads"; });
}

// Slots in ascending order, each with all its heads in ascending order, no more than fit at once.
TEST(AttentionLaunch, SlotsListTheirHeads) {
  std::vector<int32_t> kv_slot, grad_slot;
  for (int i = 0; i < 200; ++i) {
    kv_slot.push_back(i < 100 ? 7 : i % 40);
    grad_slot.push_back(i < 100 ? 50 : 100 + i % 40);
  }
  kv_slot[150] = 7;
  grad_slot[150] = 50;
  std::vector<std::vector<int32_t>> heads_of(200);
  int32_t last_slot = 0, launches = 0;
  ForEachSlotLaunch(kv_slot, grad_slot, [&](const LaunchSlots& slots) {
    ++launches;
    EXPECT_GT(slots.num_slots, 0);
    EXPECT_EQ(slots.begin[0], 0);
    for (int i = 0; i < slots.num_slots; ++i) {
      EXPECT_GE(slots.grad_slot[i], last_slot);
      last_slot = slots.grad_slot[i];
      for (int h = slots.begin[i]; h < slots.begin[i + 1]; ++h) {
        heads_of[last_slot].push_back(slots.head[h]);
        EXPECT_EQ(slots.kv_slot[i], kv_slot[slots.head[h]]);
      }
    }
  });
  EXPECT_GE(launches, 4);
  for (int32_t slot = 0; slot < 200; ++slot) {
    std::vector<int32_t> expected;
    for (int h = 0; h < 200; ++h) {
      if (grad_slot[h] == slot) expected.push_back(h);
    }
    EXPECT_EQ(heads_of[slot], expected) << slot;
  }
}

}  // namespace
}  // namespace upipe::kernels::cuda
