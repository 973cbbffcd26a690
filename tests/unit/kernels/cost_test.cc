// Pair counts against looking at every pair; costs of a few ops against hand counts.
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/api/attention_pairs.h"
#include "kernels/api/op_table.h"

namespace upipe::kernels {
namespace {

int64_t CountEveryPair(const AttentionMask& mask, PositionRun queries, PositionRun keys) {
  const auto document_of = [&](int64_t position) {
    int64_t document = 0;
    for (const int64_t start : *mask.document_starts) document += start <= position;
    return document;
  };
  int64_t pairs = 0;
  for (int64_t q = queries.begin; q < queries.end; ++q) {
    for (int64_t k = keys.begin; k < keys.end; ++k) {
      if (document_of(q) != document_of(k)) continue;
      if (mask.causal && k > q) continue;
      if (mask.window && std::abs(q - k) >= *mask.window) continue;
      ++pairs;
    }
  }
  return pairs;
}

PositionRun RandomRun(int64_t total, std::mt19937& random) {
  int64_t a = random() % (total + 1), b = random() % (total + 1);
  if (a > b) std::swap(a, b);
  return {a, b};
}

TEST(AttentionPairs, EqualsCountingEveryPair) {
  std::mt19937 random(20);
  for (int round = 0; round < 3000; ++round) {
    const int64_t total = 1 + random() % 24;
    std::vector<int64_t> starts = {0};
    for (int64_t position = 1; position < total; ++position) {
      if (random() % 5 == 0) starts.push_back(position);
    }
    AttentionMask mask{.causal = random() % 2 == 0, .total = total};
    mask.document_starts = std::make_shared<const std::vector<int64_t>>(starts);
    if (random() % 2 == 0) mask.window = 1 + random() % (total + 3);
    const PositionRun queries = RandomRun(total, random);
    const PositionRun keys = RandomRun(total, random);
    ASSERT_EQ(VisiblePairs(mask, queries, keys), CountEveryPair(mask, queries, keys))
        << "round " << round << " total " << total << " causal " << mask.causal << " window "
        << mask.window.value_or(0) << " documents " << starts.size() << " queries ["
        << queries.begin << ", " << queries.end << ") keys [" << keys.begin << ", " << keys.end
        << ")";
  }
}

TEST(AttentionPairs, MillionsOfTokensAreExact) {
  const int64_t total = int64_t{8} << 20;
  AttentionMask mask{.total = total};
  mask.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0);
  EXPECT_EQ(VisiblePairs(mask, {0, total}, {0, total}), total * (total + 1) / 2);
  mask.window = INT64_MAX;
  EXPECT_EQ(VisiblePairs(mask, {0, total}, {0, total}), total * (total + 1) / 2);
  mask.window = 1;
  EXPECT_EQ(VisiblePairs(mask, {0, total}, {0, total}), total);
}

alignas(64) float g_memory[64];

TEST(Cost, MatmulCountsTwoFlopsPerProduct) {
  MatmulParams p{.a = TensorView::Matrix(g_memory, DType::kFloat32, 5, 3),  // stored [k, m]
                 .b = TensorView::Matrix(g_memory, DType::kFloat32, 5, 4),
                 .c = TensorView::Matrix(g_memory, DType::kFloat32, 3, 4),
                 .transpose_a = true};
  EXPECT_EQ(Cost(p).flops, 2 * 3 * 4 * 5);
  EXPECT_EQ(Cost(p).bytes_read, 4 * (15 + 20));
  EXPECT_EQ(Cost(p).bytes_written, 4 * 12);
  p.beta = 1.0f;
  EXPECT_EQ(Cost(p).bytes_read, 4 * (15 + 20 + 12));
}

TEST(Cost, AttentionCountsVisiblePairsOnly) {
  const auto view = [](int64_t tokens, int64_t heads, int64_t head_dim) {
    return TensorView::Tensor3(g_memory, DType::kFloat32, {tokens, heads, head_dim},
                               heads * head_dim, head_dim);
  };
  AttentionMask mask{.total = 6};
  mask.document_starts = std::make_shared<const std::vector<int64_t>>(1, 0);
  const AttentionFwdParams fwd{.q = view(4, 3, 8),
                               .k = view(6, 1, 8),
                               .v = view(6, 1, 8),
                               .o = view(4, 3, 8),
                               .lse = TensorView::Matrix(g_memory, DType::kFloat32, 3, 4),
                               .kv_slot = {0, 0, 0},
                               .queries = {2, 6},
                               .keys = {0, 6},
                               .mask = mask};
  EXPECT_EQ(Cost(fwd).flops, 4.0 * 3 * 8 * (3 + 4 + 5 + 6));
  EXPECT_EQ(Cost(fwd).bytes_read, 4.0 * (96 + 48 + 48));
  EXPECT_EQ(Cost(fwd).bytes_written, 4.0 * (96 + 12));
  const AttentionBwdParams bwd{.q = fwd.q,
                               .k = fwd.k,
                               .v = fwd.v,
                               .dout = fwd.o,
                               .lse = fwd.lse,
                               .delta = TensorView::Matrix(g_memory, DType::kFloat32, 4, 3),
                               .dq = fwd.q,
                               .dk = fwd.k,
                               .dv = fwd.v,
                               .kv_slot = fwd.kv_slot,
                               .queries = fwd.queries,
                               .keys = fwd.keys,
                               .mask = mask};
  EXPECT_EQ(Cost(bwd).flops, 2.5 * Cost(fwd).flops);
}

}  // namespace
}  // namespace upipe::kernels
