// Pair counts against looking at every pair; costs of a few ops against hand counts.
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
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
  AttentionFwdParams fwd{.q = view(4, 3, 8),
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
  // Merged, o and lse are read too; o counts the bytes of its own type.
  fwd.q.dtype = fwd.k.dtype = fwd.v.dtype = DType::kBFloat16;
  fwd.merge = true;
  EXPECT_EQ(Cost(fwd).bytes_read, 2.0 * (96 + 48 + 48) + 4.0 * (96 + 12));
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
                               .grad_slot = fwd.kv_slot,
                               .queries = fwd.queries,
                               .keys = fwd.keys,
                               .mask = mask};
  EXPECT_EQ(Cost(bwd).flops, 2.5 * Cost(fwd).flops);
}

TensorView Bf16(std::vector<int64_t> shape) {
  if (shape.size() == 1) return TensorView::Vector(g_memory, DType::kBFloat16, shape[0]);
  return TensorView::Matrix(g_memory, DType::kBFloat16, shape[0], shape[1]);
}

TensorView Fp32(std::vector<int64_t> shape) {
  TensorView view = Bf16(std::move(shape));
  view.dtype = DType::kFloat32;
  return view;
}

void ExpectCost(const OpParams& params, double flops, double bytes_read, double bytes_written) {
  const OpCost cost = Cost(params);
  EXPECT_EQ(cost.flops, flops) << NameOf(params);
  EXPECT_EQ(cost.bytes_read, bytes_read) << NameOf(params);
  EXPECT_EQ(cost.bytes_written, bytes_written) << NameOf(params);
}

// Two bytes an element in, two or four out; a bias is one more addition per element.
TEST(Cost, Bf16MatmulWithBias) {
  MatmulParams p{.a = Bf16({3, 5}), .b = Bf16({5, 4}), .c = Fp32({3, 4}), .bias = Bf16({4})};
  ExpectCost(p, 2 * 3 * 4 * 5 + 12, 2 * (15 + 20 + 4), 4 * 12);
  p.c = Bf16({3, 4});
  p.beta = 1;
  ExpectCost(p, 2 * 3 * 4 * 5 + 12, 2 * (15 + 20 + 4 + 12), 2 * 12);
  ExpectCost(ColumnSumParams{Bf16({6, 7}), Fp32({7})}, 42, 2 * 42 + 4 * 7, 4 * 7);
}

TEST(Cost, RmsNormWithResidualAndHeads) {
  RmsNormFwdParams fwd{.x = Bf16({6, 8}), .weight = Bf16({8}), .y = Bf16({6, 8})};
  ExpectCost(fwd, 4 * 48, 2 * (48 + 8), 2 * 48);
  fwd.residual = Fp32({6, 8});
  fwd.sum = Bf16({6, 8});
  ExpectCost(fwd, 5 * 48, 2 * (48 + 8) + 4 * 48, 2 * (48 + 48));
  const auto cube = [](DType dtype) {
    return TensorView::Tensor3(g_memory, dtype, {2, 3, 8}, 24, 8);
  };
  RmsNormBwdParams bwd{.x = cube(DType::kBFloat16),
                       .weight = Bf16({8}),
                       .dy = cube(DType::kFloat32),
                       .dx = cube(DType::kBFloat16),
                       .dweight = Fp32({8})};
  ExpectCost(bwd, 11 * 48, 2 * (48 + 8 + 48) + 4 * (48 + 8), 2 * 48 + 4 * 8);
  bwd.accumulate = false;
  ExpectCost(bwd, 10 * 48, 2 * (48 + 8) + 4 * (48 + 8), 2 * 48 + 4 * 8);
}

TEST(Cost, OtherOpsInBf16) {
  const TensorView tokens = TensorView::Vector(g_memory, DType::kInt32, 6);
  ExpectCost(EmbeddingFwdParams{tokens, Bf16({9, 8}), Bf16({6, 8})}, 0, 4 * 6 + 2 * 48, 2 * 48);
  ExpectCost(EmbeddingBwdParams{tokens, Bf16({6, 8}), Fp32({9, 8})}, 48, 4 * 6 + 2 * 48 + 4 * 48,
             4 * 48);
  ExpectCost(StridedCopyParams{Fp32({6, 8}).AsTensor3(), Bf16({6, 8}).AsTensor3()}, 0, 4 * 48,
             2 * 48);
  ExpectCost(SwiGluFwdParams{Bf16({6, 8}), Bf16({6, 8}), Bf16({6, 8})}, 5 * 48, 4 * 48, 2 * 48);
  ExpectCost(SwiGluBwdParams{Bf16({6, 8}), Bf16({6, 8}), Bf16({6, 8})}, 11 * 48, 6 * 48, 6 * 48);
  const TensorView loss = TensorView::Vector(g_memory, DType::kFloat64, 2);
  CrossEntropyParams loss_only{.logits = Fp32({6, 8}), .labels = tokens, .loss_and_count = loss};
  ExpectCost(loss_only, 4 * 48, 4 * 48 + 4 * 6 + 16, 16);
  loss_only.dlogits = Bf16({6, 8});
  ExpectCost(loss_only, 6 * 48, 4 * 48 + 4 * 6 + 16, 2 * 48 + 16);
  TensorView ranges = Fp32({3, 2});
  ranges.dtype = DType::kFloat64;
  const TensorView one = TensorView::Vector(g_memory, DType::kFloat64, 1);
  ExpectCost(ClipScaleParams{one, ranges, Fp32({1}), Fp32({1}), Fp32({1})}, 8, 8 + 48, 12);
}

}  // namespace
}  // namespace upipe::kernels
